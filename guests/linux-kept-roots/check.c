/*
 * Whether a processor sees what another one does to an address space that it is not running at the moment.
 *
 *     check ROUNDS [PARAMETER]
 *
 * A thread on the first processor takes turns with another process; one on the second gives a page of theirs another
 * place in memory, again and again, and says which number it has written there. Ends with 1 if the first one then reads
 * anything else, and with 0 otherwise. PARAMETER is the module's file to which a process writes whose changes are not to
 * be looked for.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

static volatile uint64_t *page;
/*
 * What the threads tell each other: `begun` is about to be written, `said` was. It lies in memory that fork shares: a page
 * that the first write copies would be a change of its own, and a reader that missed it would wait for ever.
 */
static struct {
	atomic_ulong begun, said;
	atomic_int is_over;
} *told;
static unsigned long rounds;
static const char *parameter;

static void stay_on(int cpu)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set))
		exit(2);
}

static void *change(void *unused)
{
	stay_on(1);
	if (parameter) {
		int file = open(parameter, O_WRONLY);
		if (file < 0 || write(file, "1", 1) != 1)
			exit(2);
		close(file);
	}
	for (unsigned long n = 1; n <= rounds; n++) {
		atomic_store(&told->begun, n);
		if (madvise((void *)page, 4096, MADV_DONTNEED))
			exit(2);
		*page = n;
		atomic_store(&told->said, n);
		/* The page that went is somebody else's by now. */
		volatile uint64_t *other = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (other == MAP_FAILED)
			exit(2);
		*other = 0;
		munmap((void *)other, 4096);
		if (n % 16 == 0)
			usleep(50);
	}
	atomic_store(&told->is_over, 1);
	/* The end of a thread changes memory, too. */
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	pthread_t thread;
	unsigned long reads = 0, stale = 0;

	rounds = argc > 1 ? strtoul(argv[1], 0, 10) : 0;
	parameter = argc > 2 ? argv[2] : 0;
	page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	told = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (!rounds || page == MAP_FAILED || told == MAP_FAILED)
		return 2;
	atomic_store(&told->is_over, 0);
	stay_on(0);
	pid_t child = fork();
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;)
			sched_yield();
	}
	if (child < 0 || pthread_create(&thread, 0, change, 0))
		return 2;
	while (!atomic_load(&told->is_over)) {
		sched_yield();
		unsigned long want = atomic_load(&told->said);
		uint64_t now = *page;
		/* Nothing has changed meanwhile. */
		if (want == atomic_load(&told->begun) && now != want)
			stale++;
		reads++;
	}
	kill(child, SIGKILL);
	printf("%lu rounds, %lu reads, %lu stale\n", rounds, reads, stale);
	return stale != 0;
}
