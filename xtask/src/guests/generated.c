// Code as runtimes with W^X generate it: written through one mapping and executed through another,
// or in pages that are writable and executable in turn; patched under the feet of other threads;
// dropped, and others put in its place.
#define _GNU_SOURCE
#include <linux/membarrier.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 64, SLOT = 64, SLOTS = PAGES * PAGE / SLOT };
typedef uint32_t function(uint32_t);
static uint64_t hash = 14695981039346656037ull;
static void add(uint64_t v) { hash = (hash ^ v) * 1099511628211ull; }
static uint64_t seed = 7;
static uint32_t next(void) { return (seed = seed * 6364136223846793005ull + 1442695040888963407ull) >> 33; }
static void need(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

// imul eax, edi, k; add eax, c; then pads of different lengths and ret.
static void emit(uint8_t *to, uint32_t k, uint32_t c) {
    uint8_t code[SLOT];
    memset(code, 0xcc, sizeof code);
    int n = 0;
    code[n++] = 0x69, code[n++] = 0xc7, memcpy(code + n, &k, 4), n += 4;
    for (uint32_t i = c % 5; i > 0; i--) code[n++] = 0x90;
    code[n++] = 0x05, memcpy(code + n, &c, 4), n += 4;
    code[n++] = 0xc3;
    memcpy(to, code, sizeof code);
}

static void two_mappings(void) {
    int fd = memfd_create("code", 0);
    need(fd >= 0 && ftruncate(fd, PAGES * PAGE) == 0, "memfd");
    uint8_t *rw = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    uint8_t *rx = mmap(0, PAGES * PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, fd, 0);
    need(rw != MAP_FAILED && rx != MAP_FAILED, "two mappings");
    static uint32_t k[SLOTS], c[SLOTS];
    for (int n = 0; n < SLOTS; n++) emit(rw + n * SLOT, k[n] = next(), c[n] = next());
    for (int n = 0; n < 100000; n++) {
        uint32_t at = next() % SLOTS, x = next();
        if (n % 3 == 0) emit(rw + at * SLOT, k[at] = next(), c[at] = next());
        uint32_t got = ((function *)(rx + at * SLOT))(x);
        if (got != x * k[at] + c[at]) {
            printf("slot %u: %x, not %x\n", at, got, x * k[at] + c[at]);
            exit(2);
        }
        add(got);
    }
    // The file's pages go, and come back as zeros: ADD [RAX], AL.
    need(madvise(rw, PAGE, MADV_REMOVE) == 0, "MADV_REMOVE");
    for (int i = 0; i < PAGE; i++) need(rx[i] == 0, "removed");
    emit(rw, 3, 4);
    add(((function *)rx)(5));
    munmap(rw, PAGES * PAGE), munmap(rx, PAGES * PAGE), close(fd);
    printf("two mappings %016llx\n", (unsigned long long)hash);
}

static void flips(void) {
    uint8_t *at = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(at != MAP_FAILED, "mmap");
    for (int n = 0; n < 3000; n++) {
        uint32_t page = next() % 4, k = next(), c = next(), x = next();
        uint8_t *code = at + page * PAGE + next() % 60 * SLOT;
        need(mprotect(at + page * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
        emit(code, k, c);
        need(mprotect(at + page * PAGE, PAGE, PROT_READ | PROT_EXEC) == 0, "mprotect");
        uint32_t got = ((function *)code)(x);
        if (got != x * k + c) {
            printf("flip %d: %x\n", n, got);
            exit(3);
        }
        add(got);
        if (n % 50 == 0) {
            // Another page at the same place.
            munmap(at + page * PAGE, PAGE);
            void *new = mmap(at + page * PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
            need(new == at + page * PAGE, "mmap again");
        }
        if (n % 200 == 0) {
            // A child has its own copy.
            need(mprotect(at, 4 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0, "mprotect");
            emit(at, n, 1);
            pid_t child = fork();
            if (child == 0) {
                emit(at, n, 2);
                _exit(((function *)at)(10) == 10u * n + 2 ? 0 : 1);
            }
            uint32_t ours = ((function *)at)(10);
            int status;
            need(waitpid(child, &status, 0) == child && status == 0 && ours == 10u * n + 1, "copies");
            need(((function *)at)(10) == 10u * n + 1, "ours");
        }
    }
    munmap(at, 4 * PAGE);
    printf("flips %016llx\n", (unsigned long long)hash);
}

// A jump that others execute is pointed elsewhere by one store; after a barrier all have seen it.
static uint8_t *stub_rw, *stub_rx;
static volatile int stop;
static volatile uint32_t allowed_low, allowed_high, wrong;
static void *caller(void *unused) {
    (void)unused;
    while (!stop) {
        uint32_t low = __atomic_load_n(&allowed_low, __ATOMIC_ACQUIRE);
        uint32_t got = ((function *)stub_rx)(0);
        uint32_t high = __atomic_load_n(&allowed_high, __ATOMIC_ACQUIRE);
        if (got < low || got > high) wrong++;
    }
    return 0;
}
static void point(uint32_t target) {
    uint64_t word;
    memcpy(&word, stub_rw, 8);
    int32_t rel = (int32_t)(target * SLOT) - 5;
    word = (word & ~0xffffffffffull) | 0xe9 | (uint64_t)(uint32_t)rel << 8;
    __atomic_store_n((uint64_t *)stub_rw, word, __ATOMIC_SEQ_CST);
}
static void patched(void) {
    int fd = memfd_create("stub", 0);
    need(fd >= 0 && ftruncate(fd, PAGES * PAGE) == 0, "memfd");
    stub_rw = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    stub_rx = mmap(0, PAGES * PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, fd, 0);
    need(stub_rw != MAP_FAILED && stub_rx != MAP_FAILED, "mmap");
    need(syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0) == 0, "membarrier");
    for (uint32_t n = 1; n < SLOTS; n++) emit(stub_rw + n * SLOT, 0, n);
    point(1);
    allowed_low = allowed_high = 1;
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) need(pthread_create(threads + i, 0, caller, 0) == 0, "thread");
    for (uint32_t n = 2; n < SLOTS; n++) {
        __atomic_store_n(&allowed_high, n, __ATOMIC_SEQ_CST);
        point(n);
        need(syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0) == 0, "barrier");
        __atomic_store_n(&allowed_low, n, __ATOMIC_SEQ_CST);
        if (((function *)stub_rx)(0) != n) wrong++;
        if (n % 16 == 0) usleep(200);
    }
    stop = 1;
    for (int i = 0; i < 3; i++) pthread_join(threads[i], 0);
    printf("patched %u times, %u wrong\n", SLOTS - 2, wrong);
}

int main(void) {
    setvbuf(stdout, 0, _IOLBF, 0);
    two_mappings();
    flips();
    patched();
    return wrong != 0;
}
