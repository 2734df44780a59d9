// A VMM that asks the processor for VMX or SVM before it opens /dev/kvm, as kvmtool does.
//
// asks: also in a thread, in a child, and with all signals blocked. asks again PROGRAM: starts it.
#include "check.h"
#include <cpuid.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/kvm.h>

static int supports_vm(void)
{
	unsigned a, b, c, d;
	char vendor[13] = { 0 };

	__cpuid(0, a, b, c, d);
	memcpy(vendor, &b, 4);
	memcpy(vendor + 4, &d, 4);
	memcpy(vendor + 8, &c, 4);
	unsigned most = a;
	if (!strcmp(vendor, "AuthenticAMD") || !strcmp(vendor, "HygonGenuine")) {
		__cpuid(0x80000000, a, b, c, d);
		if (a < 0x8000000a)
			return 0;
		__cpuid(0x8000000a, a, b, c, d);
		if (!(a & 0xff) || !b)
			return 0;
		__cpuid(0x80000001, a, b, c, d);
		return c >> 2 & 1;
	}
	if (most < 1)
		return 0;
	__cpuid(1, a, b, c, d);
	return c >> 5 & 1;
}

// Another leaf is the processor's, and so are flags and other registers.
static void check_other(void)
{
	char brand[49] = { 0 };
	for (unsigned i = 0; i < 3; i++) {
		unsigned *part = (unsigned *)(brand + 16 * i);
		__cpuid(0x80000002 + i, part[0], part[1], part[2], part[3]);
	}
	FILE *file = fopen("/proc/cpuinfo", "r");
	char line[512];
	int is_found = 0;
	CHECK(file);
	char *name = brand + strspn(brand, " ");
	size_t len = strlen(name);
	while (len && name[len - 1] == ' ')
		name[--len] = 0;
	while (fgets(line, sizeof line, file))
		is_found |= strstr(line, "model name") && strstr(line, name);
	CHECK(is_found);
	fclose(file);
}

static void *thread(void *nothing)
{
	CHECK(supports_vm());
	return nothing;
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "again")) {
		execl(argv[2], argv[2], (char *)0);
		return 1;
	}
	CHECK(supports_vm());
	check_other();
	sigset_t all, before;
	sigfillset(&all);
	CHECK(!sigprocmask(SIG_SETMASK, &all, &before));
	CHECK(supports_vm());
	CHECK(!sigprocmask(SIG_SETMASK, &before, 0));
	struct sigaction action;
	CHECK(!sigaction(SIGSEGV, 0, &action) && action.sa_handler == SIG_DFL);
	pthread_t other;
	CHECK(!pthread_create(&other, 0, thread, 0));
	CHECK(!pthread_join(other, 0));
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	CHECK(kvm >= 0);
	CHECK(ioctl(kvm, KVM_GET_API_VERSION, 0) == 12);
	CHECK(supports_vm());
	pid_t child = fork();
	if (!child)
		_exit(!supports_vm());
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	return 0;
}
