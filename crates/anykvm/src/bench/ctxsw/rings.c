/* What `anykvm bench ctxsw` times: `rings NAME` runs one and prints a line
 *
 *     @ NAME NANOSECONDS COUNT
 *
 * COUNT (hexadecimal) is the number of switches, or of calls. In a guest the counters of each
 * vCPU are printed by its VMM before and after, as the program writes to STATS_PORT on it.
 *
 *     rings ring-N       N processes hand a byte round by pipes; each writes to 16 pages of its own
 *     rings getpid       system calls
 *     rings run NAME C…  a command; COUNT is 1
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/io.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGES = 16, SWITCHES = 20000, CALLS = 200000, STATS_PORT = 0xee0 };

static int in_guest;

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* Each vCPU has its own. Nothing is there natively, and nobody writes to it then. */
static void stats(void)
{
	cpu_set_t all, one;
	if (!in_guest || sched_getaffinity(0, sizeof all, &all))
		return;
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &all))
			continue;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		if (!sched_setaffinity(0, sizeof one, &one))
			outb(0, STATS_PORT);
	}
	sched_setaffinity(0, sizeof all, &all);
}

static void over(const char *name, uint64_t start, uint64_t count)
{
	uint64_t ns = now() - start;
	stats();
	printf("@ %s %llu %llx\n", name, (unsigned long long)ns, (unsigned long long)count);
	fflush(stdout);
}

static volatile char *pages;

/* Waits for the byte and hands it on, `laps` times. */
static int pass(int from, int to, long laps)
{
	char c;
	for (long i = 0; i < laps; i++) {
		if (read(from, &c, 1) != 1)
			return 1;
		for (int p = 0; p < PAGES; p++)
			pages[p << 12]++;
		if (write(to, &c, 1) != 1)
			return 1;
	}
	return 0;
}

static int ring(const char *name, long n)
{
	long laps = SWITCHES / n, warm = 2 + 200 / n;
	int first[2], in, status = 0;
	char c = 1;
	struct rlimit many = { 4096, 4096 };
	setrlimit(RLIMIT_NOFILE, &many);
	pages = mmap(0, PAGES << 12, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (n < 2 || pages == MAP_FAILED || pipe(first))
		return 1;
	in = first[0];
	for (long i = 1; i < n; i++) {
		int next[2];
		if (pipe(next))
			return 1;
		pid_t child = fork();
		if (child < 0)
			return 1;
		if (!child) {
			close(next[0]);
			_exit(pass(in, next[1], warm + laps));
		}
		close(in);
		close(next[1]);
		in = next[0];
	}
	/* The byte comes back to this process by the last pipe; `first[1]` starts it. */
	uint64_t start = 0;
	for (long i = 0; i < warm + laps; i++) {
		if (i == warm) {
			stats();
			start = now();
		}
		for (int p = 0; p < PAGES; p++)
			pages[p << 12]++;
		if (write(first[1], &c, 1) != 1 || read(in, &c, 1) != 1)
			return 1;
	}
	over(name, start, laps * n);
	for (int s; wait(&s) > 0;)
		status |= s;
	return !!status;
}

static int getpids(void)
{
	for (int i = 0; i < 1000; i++)
		syscall(SYS_getpid);
	stats();
	uint64_t start = now();
	for (int i = 0; i < CALLS; i++)
		syscall(SYS_getpid);
	over("getpid", start, CALLS);
	return 0;
}

static int run(char **argv)
{
	stats();
	uint64_t start = now();
	pid_t child = fork();
	int status;
	if (!child) {
		dup2(open("/dev/null", O_WRONLY), 1);
		execvp(argv[1], argv + 1);
		_exit(127);
	}
	waitpid(child, &status, 0);
	if (!status)
		over(argv[0], start, 1);
	return !!status;
}

int main(int argc, char **argv)
{
	in_guest = !!getenv("IN_GUEST") && !iopl(3);
	if (argc == 2 && !strncmp(argv[1], "ring-", 5))
		return ring(argv[1], atol(argv[1] + 5));
	if (argc == 2 && !strcmp(argv[1], "getpid"))
		return getpids();
	if (argc > 3 && !strcmp(argv[1], "run"))
		return run(argv + 2);
	return 2;
}
