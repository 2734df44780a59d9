/*
 * Programs of random bytes, each in a process of its own: what becomes of them, a line each. The lines are the same
 * wherever this runs, but for what processors and systems are free to do.
 *
 *     bytes FIRST COUNT
 *
 * A program is a few prefixes, an opcode of any map and a few bytes behind it, then INT3. Registers point to memory that
 * is mapped, to memory that is not, and to the end of the canonical addresses. System calls are traps.
 */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define CODE 0x10000000ul
#define DATA 0x20000000ul
#define DATA_SIZE 0x4000ul
/* The stack pointer, in the middle of its memory. */
#define STACK 0x30008000ul
#define STACK_SIZE 0x10000ul
#define HANDLER_STACK 0x40000000ul

#ifdef __x86_64__
#define ARCH AUDIT_ARCH_X86_64
#define GPRS 0, 16
#define IP REG_RIP
#define FAULT_ADDRESS(c) (c)->uc_mcontext.gregs[REG_CR2]
/* The image of FXSAVE, without the last x87 instruction. */
#define FP_BYTES(n) ((n) < 6 || ((n) >= 24 && (n) < 28) || ((n) >= 32 && (n) < 416))
#else
#define ARCH AUDIT_ARCH_I386
#define GPRS REG_EDI, REG_EAX + 1
#define IP REG_EIP
#define FAULT_ADDRESS(c) (c)->uc_mcontext.cr2
/* The image of FNSAVE, without the last x87 instruction. */
#define FP_BYTES(n) ((n) < 12 || ((n) >= 28 && (n) < 108))
#endif

/* What a program's handler leaves to the parent: it may not use the C library, whose thread data is not there. */
static struct result {
    int done;
    unsigned long facts[8], gprs[16];
} *result;
static const char *const FACTS[8] = { "signal", "code", "trap", "error", "address", "ip", "memory", "fp" };

static uint64_t state;

static uint32_t random32(void)
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return state >> 33;
}

static uint32_t hash(uint32_t h, const unsigned char *bytes, size_t size)
{
    for (size_t n = 0; n < size; n++)
        h = h * 31 + bytes[n];
    return h;
}

static void handler(int signal, siginfo_t *info, void *context)
{
    const ucontext_t *c = context;
    unsigned long trap = c->uc_mcontext.gregs[REG_TRAPNO];
    const unsigned char *fp = (const unsigned char *)c->uc_mcontext.fpregs;
    uint32_t memory = hash(hash(0, (void *)DATA, DATA_SIZE), (void *)(STACK - 0x800), 0x1000), vectors = 0;
    const int gprs[] = { GPRS };

    for (int n = 0; n < 416; n++)
        if (FP_BYTES(n))
            vectors = hash(vectors, fp + n, 1);
    const unsigned long facts[8] = {
        signal, info->si_code, trap, c->uc_mcontext.gregs[REG_ERR], trap == 14 ? FAULT_ADDRESS(c) : 0,
        c->uc_mcontext.gregs[IP], memory, vectors,
    };
    for (int n = 0; n < 8; n++)
        result->facts[n] = facts[n];
    for (int n = gprs[0]; n < gprs[1]; n++)
        result->gprs[n - gprs[0]] = c->uc_mcontext.gregs[n];
    result->done = 1;
    syscall(SYS_exit, 0);
}

static void make(unsigned char *at)
{
    static const unsigned char prefixes[] = { 0x66, 0xf2, 0xf3, 0xf0, 0x2e, 0x36, 0x3e, 0x26, 0x64, 0x65, 0x67 };

    for (int n = random32() % 3 == 0 ? 0 : random32() % 3; n > 0; n--)
        *at++ = prefixes[random32() % sizeof prefixes];
    if (random32() % 3 == 0)
        *at++ = 0x40 | random32() % 16;
    switch (random32() % 8) {
    case 0:
    case 1:
        break;
    case 2:
    case 3:
        *at++ = 0x0f;
        break;
    case 4:
        *at++ = 0x0f;
        *at++ = random32() % 2 ? 0x38 : 0x3a;
        break;
    case 5:
        *at++ = 0xc5;
        *at++ = random32();
        break;
    case 6:
        *at++ = 0xc4;
        *at++ = (random32() & 0xe0) | (1 + random32() % 3);
        *at++ = random32();
        break;
    default:
        *at++ = 0xd8 + random32() % 8;
    }
    *at++ = random32();
    /* ModRM: half of them without a displacement of 32 bits. */
    unsigned modrm = random32();
    *at++ = random32() % 2 ? (modrm & 0x3f) | (random32() % 2 ? 0x40 : 0xc0) : modrm;
    for (int n = 0; n < 6; n++)
        *at++ = random32() % 2 ? random32() : random32() % 0x20;
}

static void handle_signals(void)
{
    const int signals[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS };
    stack_t stack = { .ss_sp = (void *)HANDLER_STACK, .ss_size = STACK_SIZE };
    struct sigaction action = { .sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK };

    sigaltstack(&stack, NULL);
    for (size_t n = 0; n < sizeof signals / sizeof *signals; n++)
        sigaction(signals[n], &action, NULL);
    /* Who loops is killed. */
    struct itimerval time = { .it_value = { .tv_usec = 200000 } };
    setitimer(ITIMER_VIRTUAL, &time, NULL);
}

/* Executes the program, which may only exit. */
static void execute(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
    };
    static struct sock_fprog program;
    program = (struct sock_fprog){ .len = sizeof filter / sizeof *filter, .filter = filter };

    handle_signals();
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
#ifdef __x86_64__
    syscall(SYS_arch_prctl, ARCH_SET_GS, DATA + 0x2000);
    syscall(SYS_arch_prctl, ARCH_SET_FS, DATA + 0x1000);
    /* From here on nothing may use the C library's thread data: prctl(PR_SET_SECCOMP) by hand. */
    asm volatile("mov $157, %%eax; mov $22, %%edi; mov $2, %%esi; syscall\n"
                 "mov %1, %%rsp; vzeroall; fninit; fld1; fldpi; pcmpeqd %%xmm1, %%xmm1\n"
                 "push $0x246; popf; push %2\n"
                 "mov $0x20000100, %%rax; mov $0x20000200, %%rbx; mov $0x11, %%rcx; mov $0x20000400, %%rdx\n"
                 "mov $0x20000500, %%rsi; mov $0x20000601, %%rdi; mov $0x20000700, %%rbp; mov $0x20000800, %%r8\n"
                 "mov $3, %%r9; mov $0x20000a00, %%r10; mov $-5, %%r11; mov $0x20000c00, %%r12\n"
                 "mov $0x7ffffffffff8, %%r13; mov $0x8000000000000000, %%r14; mov $0x20000f01, %%r15\n"
                 "ret" ::"d"(&program), "r"(STACK), "r"(CODE) : "memory", "rax", "rdi", "rsi", "rcx", "r11");
#else
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
    asm volatile("mov %0, %%esp; vzeroall; fninit; fld1; fldpi; pcmpeqd %%xmm1, %%xmm1\n"
                 "push $0x246; popf; push %1\n"
                 "mov $0x20000100, %%eax; mov $0x20000200, %%ebx; mov $0x11, %%ecx; mov $0x20000400, %%edx\n"
                 "mov $0x20000500, %%esi; mov $0x20000601, %%edi; mov $0x20000700, %%ebp\n"
                 "ret" ::"r"(STACK), "i"(CODE) : "memory");
#endif
}

static void *map(unsigned long address, size_t size, int protection)
{
    void *at = mmap((void *)address, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (at == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return at;
}

int main(int arguments, char **argument)
{
    if (arguments != 3)
        return 2;
    int first = atoi(argument[1]), count = atoi(argument[2]);
    result = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    unsigned char *code = map(CODE, 4096, PROT_READ | PROT_WRITE | PROT_EXEC);
    unsigned char *data = map(DATA, DATA_SIZE, PROT_READ | PROT_WRITE);
    map(STACK - STACK_SIZE / 2, STACK_SIZE, PROT_READ | PROT_WRITE);
    memset(map(HANDLER_STACK, STACK_SIZE, PROT_READ | PROT_WRITE), 0, STACK_SIZE);
    for (size_t n = 0; n < DATA_SIZE; n++)
        data[n] = random32();
    for (int n = first; n < first + count; n++) {
        state = n * 0x9e3779b97f4a7c15ull + 1;
        memset(code, 0xcc, 80);
        make(code);
        memset(result, 0, sizeof *result);
        fflush(stdout);
        int child = fork(), status = 0;
        if (child == 0) {
            execute();
            _exit(9);
        }
        waitpid(child, &status, 0);
        printf("%d ", n);
        for (int at = 0; at < 14; at++)
            printf("%02x", code[at]);
        if (!result->done)
            printf(" status %x", status);
        for (int fact = 0; result->done && fact < 8; fact++)
            printf(" %s %lx", FACTS[fact], result->facts[fact]);
        for (int gpr = 0; result->done && gpr < 16; gpr++)
            printf(" %lx", result->gprs[gpr]);
        printf("\n");
    }
    return 0;
}
