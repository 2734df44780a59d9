/* `writer MIB RATE` writes so many pages a second, in any order, for ever. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	long pages = atol(argv[1]) << 8, rate = atol(argv[2]);
	uint64_t x = 1, start = now();
	char *memory = malloc(pages << 12);
	if (!memory)
		return 1;
	memset(memory, 1, pages << 12);
	for (long written = 0;; written++) {
		x = x * 6364136223846793005ull + 1442695040888963407ull;
		memory[(x >> 33) % pages << 12]++;
		while ((now() - start) / 1e9 * rate < written)
			usleep(1000);
	}
}
