/* Pages of several protection keys: what may read and write them, before and after changes of PKRU, in threads, over
   a fork and in system calls. What is allowed is compared with what the rights say. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { KEYS = 4, PAGES = 3 };

static sigjmp_buf back;
static volatile int code, key;

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    code = info->si_code;
    key = info->si_code == SEGV_PKUERR ? (int)info->si_pkey : -1;
    siglongjmp(back, 1);
}

static unsigned rdpkru(void) {
    unsigned eax, edx;
    __asm__ volatile(".byte 0x0f,0x01,0xee" : "=a"(eax), "=d"(edx) : "c"(0));
    return eax;
}

static void wrpkru(unsigned value) {
    __asm__ volatile(".byte 0x0f,0x01,0xef" : : "a"(value), "c"(0), "d"(0) : "memory");
}

/* r, w, or what the fault says. siglongjmp leaves the handler with the kernel's rights: they are put back. */
static int may(volatile char *page, int write) {
    unsigned rights = rdpkru();
    if (sigsetjmp(back, 1)) {
        wrpkru(rights);
        return code == SEGV_PKUERR ? 100 + key : code;
    }
    if (write) *page = *page + 1;
    else (void)*page;
    return 0;
}

static char *pages[KEYS];
static int keys[KEYS];

static int wrong;

/* The kernel's answer, by the rights in PKRU: the fault says the key if that denies, whatever else does. */
static int model(int k, int page, int write) {
    unsigned rights = rdpkru() >> (2 * keys[k]);
    if (rights & 1 || (rights & 2 && write)) return 100 + keys[k];
    return write && page == PAGES - 1 ? SEGV_ACCERR : 0;
}

static void report(const char *what) {
    unsigned long sum = 5381;
    for (int k = 0; k < KEYS; k++)
        for (int page = 0; page < PAGES; page++)
            for (int write = 0; write < 2; write++) {
                int found = may(pages[k] + 4096 * page, write);
                sum = sum * 33 + (unsigned)found;
                wrong += found != model(k, page, write);
            }
    printf("%s: %lx, pkru %x\n", what, sum, rdpkru());
}

static void *thread(void *argument) {
    (void)argument;
    report("thread");
    wrpkru(0);
    report("thread, all allowed");
    return NULL;
}

int main(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER };
    sigaction(SIGSEGV, &action, NULL);
    for (int k = 0; k < KEYS; k++) {
        pages[k] = mmap(NULL, 4096 * PAGES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        keys[k] = pkey_alloc(0, 0);
        if (keys[k] < 0) {
            perror("pkey_alloc");
            return 1;
        }
        /* The last page may never be written. */
        pkey_mprotect(pages[k], 4096 * (PAGES - 1), PROT_READ | PROT_WRITE, keys[k]);
        pkey_mprotect(pages[k] + 4096 * (PAGES - 1), 4096, PROT_READ, keys[k]);
    }
    report("all allowed");
    unsigned seed = 1;
    for (int round = 0; round < 40; round++) {
        seed = seed * 1664525 + 1013904223;
        /* Key 0 is that of the stack. */
        wrpkru(seed & ~3u);
        report("round");
    }
    /* A hundred thousand changes, with accesses that the last one allows. */
    unsigned long sum = 0;
    for (int n = 0; n < 100000; n++) {
        int k = n % KEYS;
        wrpkru(0x55555554u & ~(3u << (2 * keys[k])));
        pages[k][n % 4096]++;
        sum += (unsigned char)pages[k][(n * 7) % 4096];
    }
    printf("sum %lu, pkru %x\n", sum, rdpkru());
    wrpkru((0x55555554u & ~(3u << (2 * keys[1]))) | 2u << (2 * keys[1]));
    report("one may be read");
    /* The kernel goes by the same rights. */
    int ends[2];
    if (pipe(ends)) return 1;
    for (int k = 0; k < KEYS; k++) {
        errno = 0;
        long wrote = write(ends[1], pages[k], 10);
        printf("write %ld %d", wrote, errno);
        if (write(ends[1], "0123456789", 10) != 10) return 2;
        errno = 0;
        long got = read(ends[0], pages[k], 10);
        printf(", read %ld %d\n", got, errno);
    }
    pid_t child = fork();
    if (child == 0) {
        report("child");
        _exit(wrong);
    }
    int status = 1;
    waitpid(child, &status, 0);
    wrong += status;
    pthread_t id;
    pthread_create(&id, NULL, thread, NULL);
    pthread_join(id, NULL);
    report("after the thread");
    /* Memory for execution alone is a key's work. */
    static const unsigned char ret[] = { 0xb8, 42, 0, 0, 0, 0xc3 };
    char *text = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(text, ret, sizeof ret);
    mprotect(text, 4096, PROT_EXEC);
    int (*call)(void) = (int (*)(void))(uintptr_t)text;
    int answer = call();
    int read_it = may(text, 0);
    printf("executes %d, reads as %d\n", answer, read_it);
    printf("%s\n", wrong ? "not as PKRU says" : "all as PKRU says");
    return 0;
}
