// Writes into pages in random order, and checks each time that a page has what it was given last.
//
// writer MIB PAGES_A_SECOND NUMBER: the first of them also counts, and says where the hypervisor writes into
// memory of its own accord. A page that has something else is reported as LOST.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define WORDS 512

static uint64_t state = 88172645463325252u;

static uint64_t any(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

// KVM's MSRs whose value is an address, with the bytes that are there.
static void say_areas(void) {
    static const struct { unsigned msr; uint64_t flags; unsigned len; const char *name; } AREAS[] = {
        {0x4b564d00, 0, 12, "wall-clock"}, {0x4b564d01, 1, 32, "clock"}, {0x4b564d02, 63, 68, "page-faults"},
        {0x4b564d03, 63, 64, "steal-time"}, {0x4b564d04, 3, 4, "eoi"},
    };
    for (int cpu = 0; cpu < 64; cpu++) {
        char path[64];
        snprintf(path, sizeof path, "/dev/cpu/%d/msr", cpu);
        int file = open(path, O_RDONLY);
        if (file < 0)
            break;
        for (unsigned i = 0; i < sizeof AREAS / sizeof *AREAS; i++) {
            uint64_t value;
            if (pread(file, &value, 8, AREAS[i].msr) == 8 && value != 0)
                printf("AREA %s-%d %llu %u\n", AREAS[i].name, cpu,
                       (unsigned long long)(value & ~AREAS[i].flags), AREAS[i].len);
        }
        close(file);
    }
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    size_t pages = (size_t)atoi(argv[1]) << 8;
    double rate = atof(argv[2]);
    int number = atoi(argv[3]);
    state += number * 7919;
    uint64_t (*memory)[WORDS] =
        mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t *given = calloc(pages, 8);
    if (memory == MAP_FAILED || !given)
        return 1;
    for (size_t page = 0; page < pages; page++) {
        for (int word = 1; word < WORDS - 1; word++)
            memory[page][word] = any();
    }
    if (number == 0)
        say_areas();
    double begin = now();
    uint64_t written = 0;
    for (unsigned tick = 0;; tick++) {
        if (number == 0) {
            printf("tick %u\n", tick);
            fflush(stdout);
        }
        double end = begin + (tick + 1) * 0.1;
        uint64_t most = rate > 0 ? (uint64_t)(rate * (tick + 1) * 0.1) : ~0ull;
        while (now() < end) {
            if (written >= most) {
                usleep(2000);
                continue;
            }
            for (int i = 0; i < 16; i++, written++) {
                size_t page = any() % pages;
                int word = 1 + any() % (WORDS - 2);
                if (memory[page][0] != given[page] || memory[page][WORDS - 1] != given[page]) {
                    printf("LOST page %zu: %llu and %llu in place of %llu\n", page, (unsigned long long)memory[page][0],
                           (unsigned long long)memory[page][WORDS - 1], (unsigned long long)given[page]);
                    fflush(stdout);
                }
                memory[page][0] = memory[page][WORDS - 1] = given[page] = any();
                memory[page][word] = given[page];
            }
        }
    }
}
