/* init of a guest that measures its disk and its network adapter (see io.rs). Prints
 * "RESULT name operations nanoseconds" for each, and "GUEST-IS-GOOD" if all that came back was right. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGES 16384
#define MOST 32

static int bad;

static void fail(const char *what)
{
	perror(what);
	bad = 1;
}

static unsigned long long now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static unsigned long long random_page(void)
{
	static unsigned long long s = 88172645463325252ull;
	s ^= s << 13;
	s ^= s >> 7;
	s ^= s << 17;
	return (s >> 20) % PAGES;
}

/* Each page of the disk begins with its number. */
static void disk(const char *name, int depth, int total)
{
	int fd = open("/dev/vda", O_RDONLY | O_DIRECT);
	char *buffer = aligned_alloc(4096, 4096 * MOST);
	aio_context_t context = 0;
	struct iocb calls[MOST], *call;
	struct io_event events[MOST];
	unsigned long long begin = now();

	if (fd < 0 || syscall(SYS_io_setup, MOST, &context)) {
		fail("disk");
		return;
	}
	memset(calls, 0, sizeof calls);
	int sent = 0, done = 0;
	for (; sent < depth; sent++) {
		call = &calls[sent];
		call->aio_fildes = fd;
		call->aio_lio_opcode = IOCB_CMD_PREAD;
		call->aio_buf = (unsigned long)(buffer + 4096 * sent);
		call->aio_nbytes = 4096;
		call->aio_data = sent;
		call->aio_offset = 4096 * random_page();
		if (syscall(SYS_io_submit, context, 1, &call) != 1)
			fail("io_submit");
	}
	while (done < total && !bad) {
		int n = syscall(SYS_io_getevents, context, 1, MOST, events, 0);
		if (n < 0)
			fail("io_getevents");
		for (int i = 0; i < n; i++) {
			call = &calls[events[i].data];
			unsigned long long first = *(unsigned long long *)call->aio_buf;
			done++;
			if (events[i].res != 4096 || first != call->aio_offset / 4096) {
				printf("page %lld has %llu\n", call->aio_offset / 4096, first);
				bad = 1;
			}
			if (sent >= total)
				continue;
			sent++;
			call->aio_offset = 4096 * random_page();
			if (syscall(SYS_io_submit, context, 1, &call) != 1)
				fail("io_submit");
		}
	}
	printf("RESULT %s %d %llu\n", name, done, now() - begin);
	syscall(SYS_io_destroy, context);
	close(fd);
}

static int set(int s, unsigned long call, struct ifreq *r, const char *address)
{
	struct sockaddr_in *in = (struct sockaddr_in *)&r->ifr_addr;
	in->sin_family = AF_INET;
	in->sin_addr.s_addr = inet_addr(address);
	return ioctl(s, call, r);
}

/* Packets of 64 bytes to the host and back, one after the other. */
static void echo(int port, int total)
{
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	struct ifreq r = { .ifr_name = "eth0" };
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct timeval patience = { 1, 0 };
	char out[64] = { 0 }, in[64];
	int lost = 0;

	if (set(s, SIOCSIFADDR, &r, "10.0.2.15") || set(s, SIOCSIFNETMASK, &r, "255.255.255.0") ||
	    ioctl(s, SIOCGIFFLAGS, &r))
		return fail("eth0");
	r.ifr_flags |= IFF_UP | IFF_RUNNING;
	if (ioctl(s, SIOCSIFFLAGS, &r))
		return fail("eth0");
	to.sin_addr.s_addr = inet_addr("10.0.2.2");
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
	/* Addresses are looked for first. */
	for (int i = 0; i < 20; i++) {
		sendto(s, out, sizeof out, 0, (void *)&to, sizeof to);
		if (recv(s, in, sizeof in, 0) == sizeof in)
			break;
	}
	unsigned long long begin = now();
	for (int i = 0; i < total; i++) {
		memcpy(out, &i, sizeof i);
		sendto(s, out, sizeof out, 0, (void *)&to, sizeof to);
		if (recv(s, in, sizeof in, 0) != sizeof in || memcmp(in, out, sizeof in))
			lost++;
	}
	printf("RESULT echo %d %llu\n", total - lost, now() - begin);
	if (lost > total / 1000) {
		printf("%d packets were lost\n", lost);
		bad = 1;
	}
}

static int number(const char *line, const char *word)
{
	const char *at = strstr(line, word);
	return at ? atoi(at + strlen(word)) : 0;
}

int main(void)
{
	char path[32], line[512] = "";

	mount("p", "/proc", "proc", 0, 0);
	mount("d", "/dev", "devtmpfs", 0, 0);
	for (int n = 0;; n++) {
		snprintf(path, sizeof path, "/m/%d", n);
		int fd = open(path, O_RDONLY);
		if (fd < 0)
			break;
		if (syscall(SYS_finit_module, fd, "", 0))
			fail(path);
		close(fd);
	}
	for (int i = 0; i < 100 && access("/dev/vda", F_OK); i++)
		usleep(50000);
	FILE *f = fopen("/proc/cmdline", "r");
	if (f && fgets(line, sizeof line, f)) {
		int reads = number(line, "reads=");
		disk("warm-up", 1, reads / 4);
		disk("depth-1", 1, reads);
		disk("depth-32", 32, reads);
		echo(number(line, "port="), number(line, "packets="));
	}
	if (!bad)
		puts("GUEST-IS-GOOD");
	fflush(stdout);
	reboot(RB_POWER_OFF);
}
