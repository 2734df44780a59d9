/* The workloads of `anykvm bench memory`: `memory WHAT MIB PAGES` accesses a table of so many MiB and
 * prints a line
 *
 *     @ WHAT-MIB-PAGES NANOSECONDS CHECKSUM
 *
 * for COUNT accesses; of random ones and of chases PARTS times the best of so many parts, as another program may have the
 * processor in between. PAGES is `4k`, `2m` or `1g`: what the kernel is asked to map the table with. Where it has no pages of
 * 1 GiB reserved, as most hosts have none, `1g` takes those of 2 MiB.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* As in memory.rs. */
enum { COUNT = 2000000, PARTS = 20 };

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static uint64_t next(uint64_t *x)
{
	*x = *x * 6364136223846793005ull + 1442695040888963407ull;
	return *x >> 20;
}

static uint64_t *table;
static uint64_t words;

/* Written once, so that every page is there; each word leads to another one, in one cycle through all. */
static void fill(int chases)
{
	if (!chases) {
		for (uint64_t i = 0; i < words; i += 8)
			table[i] = i;
		return;
	}
	/* A full period: the multiplier is 1 modulo 4, the increment odd. One step for each cache line. */
	uint64_t lines = words / 8, at = 0;
	for (uint64_t i = 0; i < lines; i++) {
		uint64_t to = (at * 0x5851f42d4c957f2dull + 0x14057b7ef767814full) & (lines - 1);
		table[at * 8] = to * 8;
		at = to;
	}
}

/* Parts go on where the last one was. */
static uint64_t seed = 1, place;

static uint64_t writes(uint64_t n)
{
	uint64_t x = seed;
	for (uint64_t i = 0; i < n; i++)
		table[next(&x) & (words - 1)] += i;
	return seed = x;
}

static uint64_t reads(uint64_t n)
{
	uint64_t x = seed, s = 0;
	for (uint64_t i = 0; i < n; i++)
		s += table[next(&x) & (words - 1)];
	seed = x;
	return s;
}

static uint64_t chase(uint64_t n)
{
	uint64_t at = place;
	for (uint64_t i = 0; i < n; i++)
		at = table[at];
	return place = at;
}

/* A hash join: half of the table is built from keys, and probed with others. */
static uint64_t join(uint64_t n)
{
	uint64_t slots = words / 2, x = 1, found = 0;
	memset(table, 0, slots * 16);
	uint64_t start = now();
	for (uint64_t i = 0; i < n / 2; i++) {
		uint64_t key = next(&x) | 1;
		uint64_t at = key * 0x9e3779b97f4a7c15ull >> 20 & (slots - 1);
		while (table[at * 2])
			at = (at + 1) & (slots - 1);
		table[at * 2] = key;
		table[at * 2 + 1] = i;
	}
	x = 1;
	for (uint64_t i = 0; i < n / 2; i++) {
		uint64_t key = next(&x) | 1;
		uint64_t at = key * 0x9e3779b97f4a7c15ull >> 20 & (slots - 1);
		while (table[at * 2] && table[at * 2] != key)
			at = (at + 1) & (slots - 1);
		found += table[at * 2 + 1];
	}
	table[0] = start;
	return found;
}

/* What a collector's mark and sweep do: objects of 64 bytes are marked along pointers, then all headers are looked at. */
static uint64_t collect(uint64_t n)
{
	uint64_t at = 0, live = 0;
	for (uint64_t i = 0; i < n / 2; i++) {
		table[at + 1] |= 1;
		at = table[at];
	}
	for (uint64_t i = 0; i < words; i += 8) {
		live += table[i + 1] & 1;
		table[i + 1] = 0;
	}
	return live;
}

static const struct {
	const char *name;
	uint64_t (*run)(uint64_t n);
	int chases, parts;
} KINDS[] = {
	{ "write", writes, 0, PARTS }, { "read", reads, 0, PARTS },	{ "chase", chase, 1, PARTS },
	{ "join", join, 0, 1 },	       { "collect", collect, 1, 1 },
};

static void *map_table(uint64_t size, char pages)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
	if (pages == '1') {
		void *map = mmap(0, size, PROT_READ | PROT_WRITE, flags | MAP_HUGETLB | 30 << MAP_HUGE_SHIFT, -1, 0);
		if (map != MAP_FAILED && !madvise(map, size, MADV_POPULATE_WRITE))
			return map;
	}
	uint64_t align = pages == '4' ? 4096 : 2ull << 20;
	char *map = mmap(0, size + align, PROT_READ | PROT_WRITE, flags, -1, 0);
	if (map == MAP_FAILED)
		return map;
	map = (char *)(((uintptr_t)map + align - 1) & -align);
	madvise(map, size, pages == '4' ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
	return map;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	uint64_t size = strtoull(argv[2], 0, 0) << 20;
	words = size / 8;
	table = map_table(size, argv[3][0]);
	if (table == MAP_FAILED)
		return 1;
	for (size_t k = 0; k < sizeof KINDS / sizeof *KINDS; k++) {
		if (strcmp(argv[1], KINDS[k].name))
			continue;
		fill(KINDS[k].chases);
		/* What was there before is not what is measured. */
		KINDS[k].run(COUNT / 4);
		uint64_t best = UINT64_MAX, sum = 0;
		for (int part = 0; part < KINDS[k].parts; part++) {
			uint64_t start = now();
			sum += KINDS[k].run(COUNT / KINDS[k].parts);
			uint64_t took = now() - start;
			best = took < best ? took : best;
		}
		printf("@ %s-%s-%s %llu %llx\n", argv[1], argv[2], argv[3],
		       (unsigned long long)(best * KINDS[k].parts), (unsigned long long)sum);
		return 0;
	}
	return 2;
}
