/* What `anykvm bench vpmu` asks a kernel's events.
 *
 *     events profile RATE   five functions: the time of each, and how many of RATE samples a second found it
 *     events host           nanoseconds of an access to an event of the kernel's, if there is any
 */
#define _GNU_SOURCE
#include <linux/perf_event.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static uint64_t next(uint64_t *x)
{
	*x = *x * 6364136223846793005ull + 1442695040888963407ull;
	return *x >> 33;
}

/* What is sampled, in a section of its own: its ends are known. Each takes another part of the time. */
#define PROFILED __attribute__((noinline, noclone, section("profiled")))

PROFILED static uint64_t multiplies(uint64_t x)
{
	for (int i = 0; i < 40000; i++)
		x = x * 6364136223846793005ull + 7;
	return x;
}

PROFILED static uint64_t divides(uint64_t x)
{
	for (uint64_t i = 1; i < 3000; i++)
		x = (x | 1ull << 63) / i + i;
	return x;
}

PROFILED static uint64_t chooses(uint64_t x)
{
	for (int i = 0; i < 4000; i++)
		x = next(&x) & 1 ? x * 3 : x >> 1 | 1ull << 62;
	return x;
}

PROFILED static uint64_t scans(uint64_t x)
{
	static uint32_t table[1 << 16];
	for (int i = 0; i < 1 << 14; i++)
		x += table[(x + i * 61) & 0xffff]++;
	return x;
}

PROFILED static uint64_t calls(uint64_t n)
{
	return n < 2 ? 1 : calls(n - 1) + calls(n - 2);
}

static int profile(long rate)
{
	static const struct {
		const char *name;
		uint64_t (*run)(uint64_t), argument;
	} functions[] = {
		{ "multiplies", multiplies, 1 }, { "divides", divides, 1 }, { "chooses", chooses, 1 },
		{ "scans", scans, 1 },           { "calls", calls, 17 },
	};
	enum { N = sizeof functions / sizeof *functions, PAGES = 256 };
	struct perf_event_attr a = { .size = sizeof a, .type = PERF_TYPE_HARDWARE, .config = PERF_COUNT_HW_CPU_CYCLES };
	a.freq = a.exclude_kernel = a.exclude_hv = 1;
	a.sample_freq = rate;
	a.sample_type = PERF_SAMPLE_IP;
	int f = syscall(SYS_perf_event_open, &a, 0, -1, -1, 0);
	struct perf_event_mmap_page *head = MAP_FAILED;
	if (f >= 0)
		head = mmap(0, (PAGES + 1) << 12, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
	if (head == MAP_FAILED) {
		perror("no samples");
		return 1;
	}
	uint64_t time[N] = { 0 }, samples[N] = { 0 }, sum = 0, x = 1;
	for (uint64_t start = now(); now() - start < 4000000000;) {
		int n = next(&x) % N;
		uint64_t before = now();
		sum += functions[n].run(functions[n].argument);
		time[n] += now() - before;
	}
	const char *records = (const char *)head + 4096;
	for (uint64_t at = 0; at < head->data_head;) {
		const struct perf_event_header *h = (void *)(records + at % (PAGES << 12));
		uint64_t ip = *(uint64_t *)(h + 1), near = 0;
		int found = -1;
		for (int n = 0; n < N && h->type == PERF_RECORD_SAMPLE; n++)
			if ((uint64_t)functions[n].run <= ip && (uint64_t)functions[n].run >= near) {
				near = (uint64_t)functions[n].run;
				found = n;
			}
		extern const char __stop_profiled[];
		if (found >= 0 && ip < (uint64_t)__stop_profiled)
			samples[found]++;
		at += h->size;
	}
	for (int n = 0; n < N; n++)
		printf("@ %s %llu %llx\n", functions[n].name, (unsigned long long)time[n], (unsigned long long)samples[n]);
	return sum == 1;
}

/* As a virtual PMU does that has an event of the kernel's made anew for each access, and one that keeps and switches it. */
static int host_events(void)
{
	enum { TURNS = 20000 };
	struct perf_event_attr a = { .size = sizeof a, .type = PERF_TYPE_HARDWARE, .config = PERF_COUNT_HW_INSTRUCTIONS };
	a.exclude_kernel = a.exclude_hv = a.disabled = 1;
	int f = syscall(SYS_perf_event_open, &a, 0, -1, -1, 0);
	if (f < 0) {
		a.type = PERF_TYPE_SOFTWARE;
		a.config = PERF_COUNT_SW_TASK_CLOCK;
		f = syscall(SYS_perf_event_open, &a, 0, -1, -1, 0);
	}
	if (f < 0)
		return 0;
	const char *kind = a.type == PERF_TYPE_HARDWARE ? "instructions" : "task-clock";
	uint64_t value, start = now();
	for (int i = 0; i < TURNS; i++) {
		int made = syscall(SYS_perf_event_open, &a, 0, -1, -1, 0);
		ioctl(made, PERF_EVENT_IOC_ENABLE, 0);
		close(made);
	}
	printf("@ %s:anew %llu 1\n", kind, (unsigned long long)(now() - start) / TURNS);
	start = now();
	for (int i = 0; i < TURNS; i++) {
		ioctl(f, PERF_EVENT_IOC_DISABLE, 0);
		ioctl(f, PERF_EVENT_IOC_ENABLE, 0);
	}
	printf("@ %s:kept %llu 1\n", kind, (unsigned long long)(now() - start) / TURNS);
	start = now();
	for (int i = 0; i < TURNS; i++)
		if (read(f, &value, 8) != 8)
			return 1;
	printf("@ %s:read %llu 1\n", kind, (unsigned long long)(now() - start) / TURNS);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 2 && !strcmp(argv[1], "profile"))
		return profile(atol(argv[2]));
	if (argc > 1 && !strcmp(argv[1], "host"))
		return host_events();
	return 2;
}
