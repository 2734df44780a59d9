/*
 * A small VMM on the KVM ABI, for `anykvm exec`. Each mode is one test; it prints what is wrong and
 * ends with 1, or ends with 0.
 */
#include "check.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/eventfd.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <dirent.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

static int kvm, vm, vcpu;
static struct kvm_run *run;
static uint8_t *memory;
static int map_size;

static int with_chips;

/* A vCPU in real mode that executes `code`. */
static void make(const uint8_t *code, size_t length)
{
    kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    CHECK(kvm >= 0);
    CHECK(ioctl(kvm, KVM_GET_API_VERSION, 0) == 12);
    vm = ioctl(kvm, KVM_CREATE_VM, 0);
    CHECK(vm >= 0);
    memory = mmap(NULL, 0x10000, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memcpy(memory + 0x1000, code, length);
    struct kvm_userspace_memory_region region = {
        .memory_size = 0x10000, .userspace_addr = (uintptr_t)memory,
    };
    CHECK(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
    if (with_chips)
        CHECK(ioctl(vm, KVM_CREATE_IRQCHIP, 0) == 0);
    vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    CHECK(vcpu >= 0);
    map_size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    run = mmap(NULL, map_size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    CHECK(run != MAP_FAILED);
    start_at_0x1000(vcpu);
}

static const uint8_t SPIN[] = { 0xeb, 0xfe };              /* jmp . */
static const uint8_t HALT[] = { 0xf4, 0xeb, 0xfd };        /* 1: hlt; jmp 1b */
static const uint8_t PORT[] = { 0xe6, 0x10, 0xeb, 0xfc };  /* 1: out 0x10, al; jmp 1b */

static _Atomic uint64_t handled, returned, stop;
static _Atomic uint64_t slowest;

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void count(int signal) { (void)signal; handled++; }

static int blocked_in_run, clears_exit;

static uint32_t *latencies; /* In nanoseconds. */
static int ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}
static void report(long times, uint64_t total)
{
    qsort(latencies, times, sizeof *latencies, ascending);
    printf("%ld kicks, mean %.1f us, 50%% within %.1f, 90%% %.1f, 99%% %.1f, 99.9%% %.1f, slowest %.0f us, %llu EINTR\n",
           times, total / 1000.0 / times, latencies[times / 2] / 1000.0, latencies[times - 1 - times / 10] / 1000.0,
           latencies[times - 1 - times / 100] / 1000.0, latencies[times - 1 - times / 1000] / 1000.0,
           slowest / 1000.0, (unsigned long long)returned);
}

/* Runs the vCPU until told to stop: a signal ends KVM_RUN with EINTR after its handler is due. */
static void *runner(void *argument)
{
    (void)argument;
    while (!stop) {
        uint64_t before = handled;
        int result = ioctl(vcpu, KVM_RUN, 0);
        if (result == 0) {
            CHECK(run->exit_reason == KVM_EXIT_IO);
            continue;
        }
        CHECK(result == -1 && errno == EINTR);
        if (clears_exit) {
            run->immediate_exit = 0;
            returned++;
            continue;
        }
        CHECK(run->exit_reason == KVM_EXIT_INTR);
        /* Without a mask the handler ran before KVM_RUN came back; nothing else ends it. */
        if (!blocked_in_run)
            CHECK(handled > before);
        else {
            sigset_t set;
            siginfo_t info;
            sigemptyset(&set);
            sigaddset(&set, SIGUSR1);
            struct timespec none = { 0, 0 };
            CHECK(sigtimedwait(&set, &info, &none) == SIGUSR1);
            handled++;
        }
        returned++;
    }
    return NULL;
}

/* Runs the vCPU in a thread and signals it at random moments; each time the counter has to move. */
static void disturb(long times, _Atomic uint64_t *counter, int sets_exit, const char *what)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, runner, NULL) == 0);
    unsigned seed = 1;
    uint64_t total = 0;
    latencies = calloc(times, sizeof *latencies);
    CHECK(latencies);
    for (long i = 0; i < times; i++) {
        uint64_t before = *counter;
        for (volatile unsigned n = rand_r(&seed) % 3000; n > 0; n--) {}
        uint64_t start = now();
        if (sets_exit)
            __atomic_store_n(&run->immediate_exit, 1, __ATOMIC_SEQ_CST);
        CHECK(pthread_kill(thread, SIGUSR1) == 0);
        while (*counter == before)
            if (now() - start > 10000000000ull) {
                fprintf(stderr, "%s %ld was lost\n", what, i);
                exit(1);
            }
        uint64_t took = now() - start;
        total += took;
        latencies[i] = took > UINT32_MAX ? UINT32_MAX : took;
        if (took > slowest)
            slowest = took;
    }
    stop = 1;
    while (pthread_tryjoin_np(thread, NULL) != 0) {
        pthread_kill(thread, SIGUSR1);
        usleep(100);
    }
    report(times, total);
}

/* `times` signals at random moments: each is handled once and ends one KVM_RUN, soon. */
static void kick(const uint8_t *code, size_t length, long times, int masked)
{
    make(code, length);
    struct sigaction action = { .sa_handler = count };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    struct sigaction read_back;
    CHECK(sigaction(SIGUSR1, NULL, &read_back) == 0);
    CHECK(read_back.sa_handler == count && !(read_back.sa_flags & SA_SIGINFO));
    blocked_in_run = masked;
    /* The default action, which is the process's end, does not happen while the thread blocks it. */
    if (masked == 2)
        CHECK(signal(SIGUSR1, SIG_DFL) != SIG_ERR);
    if (masked) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0);
        struct { struct kvm_signal_mask head; uint64_t set; } __attribute__((packed)) mask;
        memset(&mask, 0, sizeof mask);
        mask.head.len = 8;
        memcpy(mask.head.sigset, &(uint64_t){ 0 }, 8);
        CHECK(ioctl(vcpu, KVM_SET_SIGNAL_MASK, &mask) == 0);
    }
    disturb(times, &handled, 0, "signal");
    /* One that arrives between two KVM_RUNs or with an exit ends none; most do. */
    CHECK(returned <= handled);
}

/* Another thread sets immediate_exit and sends a signal whose handler does nothing: KVM_RUN ends. */
static void sender(long times)
{
    make(SPIN, sizeof SPIN);
    struct sigaction action = { .sa_handler = count };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    clears_exit = 1;
    disturb(times, &returned, 1, "immediate_exit");
}

/* immediate_exit set by a handler, and before the call. */
static void set_exit(int signal) { (void)signal; run->immediate_exit = 1; handled++; }

static void immediate(long times)
{
    make(SPIN, sizeof SPIN);
    struct sigaction action = { .sa_handler = set_exit };
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    for (long i = 0; i < times; i++) {
        struct itimerspec after = { .it_value.tv_nsec = 1 + i % 50000 };
        static timer_t timer;
        if (i == 0)
            CHECK(timer_create(CLOCK_MONOTONIC, NULL, &timer) == 0);
        run->immediate_exit = 0;
        CHECK(timer_settime(timer, 0, &after, NULL) == 0);
        CHECK(ioctl(vcpu, KVM_RUN, 0) == -1 && errno == EINTR);
        CHECK(run->immediate_exit == 1 && handled == (uint64_t)i + 1);
        CHECK(ioctl(vcpu, KVM_RUN, 0) == -1 && errno == EINTR);
    }
}

/* A handler may leave by longjmp, ask its siginfo, use the vCPU, and have been set with SA_RESETHAND. */
#include <setjmp.h>
static sigjmp_buf jump;
static void leave(int signal, siginfo_t *info, void *context)
{
    (void)signal; (void)context;
    struct kvm_regs regs;
    if (info->si_value.sival_int != 42 || info->si_code != SI_TIMER ||
        ioctl(vcpu, KVM_GET_REGS, &regs) != 0 || regs.rip < 0x1000 || regs.rip > 0x1004)
        _exit(1);
    siglongjmp(jump, 1);
}

static void handlers(void)
{
    make(SPIN, sizeof SPIN);
    for (int i = 0; i < 1000; i++) {
        struct sigaction action = {
            .sa_sigaction = leave, .sa_flags = SA_SIGINFO | (i % 2 ? SA_RESETHAND : SA_RESTART | SA_NODEFER),
        };
        CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
        struct sigevent event = {
            .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2, .sigev_value.sival_int = 42,
        };
        timer_t timer;
        CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
        if (sigsetjmp(jump, 1) == 0) {
            struct itimerspec after = { .it_value.tv_nsec = 100000 };
            CHECK(timer_settime(timer, 0, &after, NULL) == 0);
            for (;;)
                CHECK(ioctl(vcpu, KVM_RUN, 0) == -1 && errno == EINTR);
        }
        CHECK(timer_delete(timer) == 0);
        struct sigaction now_set;
        CHECK(sigaction(SIGUSR2, NULL, &now_set) == 0);
        if (i % 2)
            CHECK(now_set.sa_handler == SIG_DFL);
        else
            /* Some C libraries show a flag of their own, 0x04000000. */
            CHECK(now_set.sa_sigaction == leave &&
                  (now_set.sa_flags & ~0x04000000) == (SA_SIGINFO | SA_RESTART | SA_NODEFER));
    }
    /* The mask is what it was. */
    sigset_t mask;
    CHECK(sigprocmask(SIG_BLOCK, NULL, &mask) == 0);
    for (int signal = 1; signal < 32; signal++)
        CHECK(!sigismember(&mask, signal));
}

/* A handler on a stack of its own runs the vCPU, as gVisor's does, and a signal that comes meanwhile
 * has to leave alone what is on that stack. */
static void runs(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    volatile uint8_t mine[4096];
    for (size_t i = 0; i < sizeof mine; i++)
        mine[i] = (uint8_t)i;
    pid_t sender = info->si_pid;
    /* Again, in case the first comes before KVM_RUN. */
    struct itimerval soon = { .it_value.tv_usec = 200, .it_interval.tv_usec = 5000 }, never = { 0 };
    CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
    CHECK(ioctl(vcpu, KVM_RUN, 0) == -1 && errno == EINTR);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    for (size_t i = 0; i < sizeof mine; i++)
        CHECK(mine[i] == (uint8_t)i);
    CHECK(info->si_pid == sender);
}

static void nested(long times)
{
    make(SPIN, sizeof SPIN);
    stack_t stack = { .ss_sp = malloc(128 << 10), .ss_size = 128 << 10 };
    CHECK(stack.ss_sp && sigaltstack(&stack, NULL) == 0);
    struct sigaction run_there = { .sa_sigaction = runs, .sa_flags = SA_SIGINFO | SA_ONSTACK };
    struct sigaction count_there = { .sa_handler = count, .sa_flags = SA_ONSTACK };
    CHECK(sigaction(SIGUSR1, &run_there, NULL) == 0 && sigaction(SIGALRM, &count_there, NULL) == 0);
    for (long i = 1; i <= times; i++) {
        CHECK(raise(SIGUSR1) == 0);
        CHECK(handled >= (uint64_t)i);
    }
    stack_t after;
    CHECK(sigaltstack(NULL, &after) == 0 && after.ss_sp == stack.ss_sp && !(after.ss_flags & SS_DISABLE));
}

static pthread_t nested_target;
static volatile int nested_over;

static void *send_alarms(void *unused)
{
    (void)unused;
    while (!nested_over)
        pthread_kill(nested_target, SIGALRM);
    return NULL;
}

/* Calls of a handler on its own stack, each of which signals with that stack come in at any instruction. */
static long nested_times;
static void calls(int signal)
{
    (void)signal;
    volatile uint8_t mine[4096];
    for (size_t i = 0; i < sizeof mine; i++)
        mine[i] = (uint8_t)i;
    for (long n = 0; n < nested_times || !handled; n++) {
        CHECK(ioctl(kvm, KVM_CHECK_EXTENSION, KVM_CAP_NR_VCPUS) > 0);
        for (size_t i = 0; i < sizeof mine; i += 61)
            CHECK(mine[i] == (uint8_t)i);
    }
}

static void nested_calls(long times)
{
    make(SPIN, sizeof SPIN);
    stack_t stack = { .ss_sp = malloc(128 << 10), .ss_size = 128 << 10 };
    CHECK(stack.ss_sp && sigaltstack(&stack, NULL) == 0);
    struct sigaction call_there = { .sa_handler = calls, .sa_flags = SA_ONSTACK };
    struct sigaction count_there = { .sa_handler = count, .sa_flags = SA_ONSTACK };
    CHECK(sigaction(SIGUSR1, &call_there, NULL) == 0 && sigaction(SIGALRM, &count_there, NULL) == 0);
    nested_times = times;
    nested_target = pthread_self();
    pthread_t sender;
    CHECK(pthread_create(&sender, NULL, send_alarms, NULL) == 0);
    CHECK(raise(SIGUSR1) == 0);
    nested_over = 1;
    CHECK(pthread_join(sender, NULL) == 0 && handled > 0);
    sigset_t mask;
    CHECK(sigprocmask(SIG_BLOCK, NULL, &mask) == 0 && !sigismember(&mask, SIGALRM));
    stack_t after;
    CHECK(sigaltstack(NULL, &after) == 0 && after.ss_sp == stack.ss_sp && !(after.ss_flags & SS_DISABLE));
}

/* Chips and a vCPU that could not be made for want of descriptors can be made later. */
static void few_descriptors(int system)
{
    int failed = 0;
    for (int room = 0; room < 12; room++) {
        int fresh = ioctl(system, KVM_CREATE_VM, 0);
        int next = dup(fresh);
        close(next);
        struct rlimit limit;
        CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
        struct rlimit few = { .rlim_cur = next + room, .rlim_max = limit.rlim_max };
        CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
        int chips = ioctl(fresh, KVM_CREATE_IRQCHIP, 0);
        int first = chips == 0 ? ioctl(fresh, KVM_CREATE_VCPU, 0) : -1, error = errno;
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        CHECK(first >= 0 || error == EMFILE || error == ENOMEM);
        failed += first < 0;
        CHECK(chips == 0 || ioctl(fresh, KVM_CREATE_IRQCHIP, 0) == 0);
        if (first < 0)
            first = ioctl(fresh, KVM_CREATE_VCPU, 0);
        CHECK(first >= 0 && close(first) == 0 && close(fresh) == 0);
    }
    CHECK(failed > 0 && failed < 12);
}

/* Descriptors: duplicates, /proc, a socket, fork, exec, vfork; /dev/kvm is there. */
static void descriptors(const char *self)
{
    struct stat status;
    CHECK(access("/dev/kvm", R_OK | W_OK) == 0);
    CHECK(stat("/dev/kvm", &status) == 0 && S_ISCHR(status.st_mode));
    int dev = open("/dev", O_RDONLY | O_DIRECTORY);
    int relative = openat(dev, "kvm", O_RDWR);
    CHECK(relative >= 0 && ioctl(relative, KVM_GET_API_VERSION, 0) == 12);
    CHECK(syscall(SYS_openat, AT_FDCWD, "/dev/kvm", O_RDWR) >= 0);
    /* What a sandbox names a file by, and nobody makes calls with. */
    int place = open("/dev/kvm", O_PATH | O_CLOEXEC);
    CHECK(place >= 0 && fstat(place, &status) == 0 && S_ISCHR(status.st_mode));
    CHECK(ioctl(place, KVM_GET_API_VERSION, 0) == -1 && errno == EBADF);
    close(place);
    make(PORT, sizeof PORT);
    int copies[3] = { dup(vcpu), fcntl(vcpu, F_DUPFD_CLOEXEC, 100), dup3(vcpu, 200, 0) };
    close(vcpu);
    close(copies[0]);
    close(copies[1]);
    CHECK(ioctl(copies[2], KVM_RUN, 0) == 0 && run->exit_reason == KVM_EXIT_IO);
    CHECK(ioctl(vcpu, KVM_RUN, 0) == -1 && errno == EBADF);
    CHECK(ioctl(dev, KVM_GET_API_VERSION, 0) == -1 && errno == ENOTTY);
    vcpu = copies[2];
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", kvm);
    int again = open(path, O_RDWR);
    close(kvm);
    CHECK(ioctl(again, KVM_CHECK_EXTENSION, KVM_CAP_USER_MEMORY) == 1);
    CHECK(syscall(SYS_ioctl, vcpu, KVM_RUN, 0) == 0);
    few_descriptors(again);
    /* KVM_RUN goes to the vCPU that the number means now, also where the thread has just run another by it. */
    int first = dup(vcpu), other = ioctl(vm, KVM_CREATE_VCPU, 1);
    struct kvm_run *others = mmap(NULL, map_size, PROT_READ | PROT_WRITE, MAP_SHARED, other, 0);
    CHECK(first >= 0 && other >= 0 && others != MAP_FAILED);
    start_at_0x1000(other);
    run->exit_reason = 0;
    CHECK(dup2(other, vcpu) == vcpu && ioctl(vcpu, KVM_RUN, 0) == 0);
    CHECK(others->exit_reason == KVM_EXIT_IO && run->exit_reason == 0);
    CHECK(dup2(first, vcpu) == vcpu && ioctl(vcpu, KVM_RUN, 0) == 0);
    CHECK(run->exit_reason == KVM_EXIT_IO);
    int file = open("/dev/null", O_RDONLY);
    CHECK(dup2(file, vcpu) == vcpu && ioctl(vcpu, KVM_RUN, 0) == -1 && errno == ENOTTY);
    CHECK(dup3(first, vcpu, 0) == vcpu && ioctl(vcpu, KVM_RUN, 0) == 0);
    CHECK(dup2(-1, vcpu) == -1 && errno == EBADF && ioctl(vcpu, KVM_RUN, 0) == 0);
    close(file);
    close(first);
    close(other);
    /* A child has the descriptors, but the VM is its parent's. */
    pid_t child = fork();
    if (child == 0) {
        if (ioctl(vcpu, KVM_RUN, 0) != -1 || errno != EIO)
            _exit(1);
        _exit(ioctl(again, KVM_CREATE_VM, 0) < 0);
    }
    int result;
    CHECK(waitpid(child, &result, 0) == child && result == 0);
    child = vfork();
    if (child == 0) {
        close(vcpu);
        close(vm);
        _exit(0);
    }
    CHECK(waitpid(child, &result, 0) == child && result == 0);
    CHECK(ioctl(vcpu, KVM_RUN, 0) == 0);
    /* A program that is started with an open /dev/kvm. */
    child = fork();
    if (child == 0) {
        dup2(again, 9);
        execl(self, self, "inherited", NULL);
        _exit(1);
    }
    CHECK(waitpid(child, &result, 0) == child && result == 0);
    /* Nothing else is disturbed. */
    CHECK(close(12345) == -1 && errno == EBADF);
    CHECK(open("/nonexistent", O_RDONLY) == -1 && errno == ENOENT);
}

/* The filter is for all threads; they share a processor. */
static int for_all, shares;

/* What a filter lets through: a call, and the value of one or two arguments if not -1. */
struct rule { int number, first, first_value, second, second_value; };
static const struct rule FILTER[] = {
    { SYS_ioctl, -1, 0, -1, 0 }, { SYS_read, -1, 0, -1, 0 }, { SYS_write, -1, 0, -1, 0 },
    { SYS_close, -1, 0, -1, 0 }, { SYS_exit, -1, 0, -1, 0 }, { SYS_exit_group, -1, 0, -1, 0 },
    { SYS_rt_sigreturn, -1, 0, -1, 0 }, { SYS_rt_sigprocmask, -1, 0, -1, 0 },
    { SYS_tkill, -1, 0, -1, 0 }, { SYS_timerfd_settime, -1, 0, -1, 0 }, { SYS_munmap, -1, 0, -1, 0 },
    { SYS_futex, 1, 0, -1, 0 }, { SYS_futex, 1, 1, -1, 0 }, { SYS_futex, 1, 128, -1, 0 },
    { SYS_futex, 1, 129, -1, 0 }, { SYS_futex, 1, 137, -1, 0 },
    /* Builds for development look whether what they close is open. */
    { SYS_fcntl, 1, F_GETFD, -1, 0 },
    { SYS_madvise, 2, MADV_DONTNEED, -1, 0 },
    { SYS_mmap, 2, PROT_READ | PROT_WRITE, 3, MAP_PRIVATE | MAP_ANONYMOUS },
    /* The main thread's, where a filter is for all threads. */
    { SYS_clock_nanosleep, -1, 0, -1, 0 }, { SYS_nanosleep, -1, 0, -1, 0 }, { SYS_tgkill, -1, 0, -1, 0 },
    { SYS_getpid, -1, 0, -1, 0 },
};

/* Names the call that a filter does not allow. */
static void forbidden(int signal, siginfo_t *info, void *context)
{
    (void)signal; (void)context;
    char text[] = "forbidden system call 000\n";
    for (int i = 24, n = info->si_syscall; i >= 22; i--, n /= 10)
        text[i] = '0' + n % 10;
    ssize_t written = write(2, text, sizeof text - 1);
    (void)written;
    _exit(1);
}

static void install_filter(void)
{
    enum { RULES = sizeof FILTER / sizeof *FILTER, MAIN_THREAD = 4 };
    struct sock_filter program[RULES * 6 + 1];
    unsigned n = 0;
    for (unsigned i = 0; i < (for_all ? RULES : RULES - MAIN_THREAD); i++) {
        const struct rule *r = &FILTER[i];
        int checks = (r->first >= 0) + (r->second >= 0);
        program[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
        program[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, r->number, 0, 2 * checks + 1);
        for (int c = 0; c < checks; c++) {
            int argument = c ? r->second : r->first, value = c ? r->second_value : r->first_value;
            program[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[argument]));
            program[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 2 * (checks - c) - 1);
        }
        program[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    program[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    struct sock_fprog fprog = { .len = n, .filter = program };
    struct sigaction action = { .sa_sigaction = forbidden, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGSYS, &action, NULL) == 0);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    int flags = for_all ? SECCOMP_FILTER_FLAG_TSYNC : 0;
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &fprog) == 0);
}

static int bells[2];
static _Atomic long filtered_thread;

/* struct kvm_steal_time, which the guest leaves alone. */
enum { STEAL = 0x7000, STEAL_VERSION = 0x7008 };

static void ask_for_steal_time(void)
{
    struct { struct kvm_msrs head; struct kvm_msr_entry entry; } msrs = {
        .head.nmsrs = 1, .entry = { .index = 0x4b564d03, .data = STEAL | 1 },
    };
    CHECK(ioctl(vcpu, KVM_SET_MSRS, &msrs) == 1);
}

/* No more than what the kernel says of the vCPU's thread; without the figures, an estimate. */
static void check_steal_time(void)
{
    char path[64];
    unsigned long long run, waited;
    snprintf(path, sizeof path, "/proc/self/task/%ld/schedstat", filtered_thread);
    uint64_t told = *(volatile uint64_t *)(memory + STEAL);
    FILE *file = fopen(path, "r");
    CHECK(file && fscanf(file, "%llu %llu", &run, &waited) == 2);
    fclose(file);
    CHECK(told <= waited && (told > 0 || !shares));
    CHECK(*(volatile uint32_t *)(memory + STEAL_VERSION) >= 2);
}

/* What a VMM does when the guest sets up a device's queue. */
static void set_up_queue(void)
{
    struct kvm_irqfd irqfd = { .fd = bells[0], .gsi = 5 };
    CHECK(ioctl(vm, KVM_IRQFD, &irqfd) == 0);
    CHECK(ioctl(vm, KVM_IRQFD, &irqfd) == -1 && errno == EBUSY);
    irqfd.flags = KVM_IRQFD_FLAG_DEASSIGN;
    CHECK(ioctl(vm, KVM_IRQFD, &irqfd) == 0);
    struct kvm_ioeventfd bell = { .addr = 0xd0000000, .len = 4, .fd = bells[1] };
    CHECK(ioctl(vm, KVM_IOEVENTFD, &bell) == 0);
    CHECK(ioctl(vm, KVM_IOEVENTFD, &bell) == -1 && errno == EEXIST);
    bell.flags = KVM_IOEVENTFD_FLAG_DEASSIGN;
    CHECK(ioctl(vm, KVM_IOEVENTFD, &bell) == 0);
    CHECK(ioctl(vm, KVM_IOEVENTFD, &bell) == -1 && errno == ENOENT);
    irqfd = (struct kvm_irqfd){ .fd = 9999 };
    CHECK(ioctl(vm, KVM_IRQFD, &irqfd) == -1 && errno == EBADF);
}

/* A vCPU's thread under a strict filter, what our own code allocates there included. */
/* A program may open the device at any time, and ask for another VM. */
static void open_again(void)
{
    int system = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    CHECK(system >= 0);
    CHECK(ioctl(system, KVM_GET_API_VERSION, 0) == 12);
    int other = ioctl(system, KVM_CREATE_VM, 0);
    CHECK(other >= 0);
    CHECK(ioctl(other, KVM_CREATE_IRQCHIP, 0) == 0);
    CHECK(close(other) == 0 && close(system) == 0);
}

static void *filtered(void *argument)
{
    (void)argument;
    filtered_thread = syscall(SYS_gettid);
    install_filter();
    for (int i = 0; i < 100000; i++) {
        /* Long enough for the figures to be asked for. */
        if (i % 1000 == 0)
            for (uint64_t begin = now(); now() - begin < 200000;) {}
        if (ioctl(vcpu, KVM_RUN, 0) == 0)
            CHECK(run->exit_reason == KVM_EXIT_IO);
        else
            CHECK(errno == EINTR);
        struct kvm_regs regs;
        if (i % 1000 == 0) {
            CHECK(ioctl(vcpu, KVM_GET_REGS, &regs) == 0);
            CHECK(ioctl(vcpu, KVM_SET_REGS, &regs) == 0);
            CHECK(ioctl(vcpu, KVM_GET_REGS, (void *)8) == -1 && errno == EFAULT);
            CHECK(ioctl(vcpu, KVM_SET_REGS, (void *)-4096l) == -1 && errno == EFAULT);
            struct kvm_vcpu_events events;
            CHECK(ioctl(vcpu, KVM_GET_VCPU_EVENTS, &events) == 0);
            static struct kvm_xsave xsave;
            CHECK(ioctl(vcpu, KVM_GET_XSAVE, &xsave) == 0);
            CHECK(ioctl(vcpu, KVM_SET_XSAVE, &xsave) == 0);
            struct { struct kvm_msrs head; struct kvm_msr_entry entry; } msrs = { .head.nmsrs = 1, .entry.index = 0x10 };
            CHECK(ioctl(vcpu, KVM_GET_MSRS, &msrs) == 1);
            if (with_chips)
                set_up_queue();
            if (i % 10000 == 0)
                open_again();
        }
    }
    /* The guest goes on to what ends in no exit, and signals end KVM_RUN. */
    memcpy(memory + 0x1000, SPIN, sizeof SPIN);
    struct kvm_regs regs = { .rip = 0x1000, .rflags = 2, .rsp = 0x8000 };
    CHECK(ioctl(vcpu, KVM_SET_REGS, &regs) == 0);
    runner(NULL);
    close(vcpu);
    close(vm);
    return NULL;
}

static void seccomp(void)
{
    if (shares) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(sched_getcpu(), &one);
        CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    }
    make(PORT, sizeof PORT);
    ask_for_steal_time();
    for (int i = 0; i < 2; i++)
        CHECK((bells[i] = eventfd(0, EFD_NONBLOCK)) >= 0);
    struct sigaction action = { .sa_handler = count };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, filtered, NULL) == 0);
    while (handled < 2000) {
        usleep(100);
        CHECK(pthread_kill(thread, SIGUSR1) == 0);
    }
    if (!for_all)
        check_steal_time();
    stop = 1;
    while (pthread_tryjoin_np(thread, NULL) != 0) {
        pthread_kill(thread, SIGUSR1);
        usleep(100);
    }
    CHECK(returned > 100);
}

/* Stops a process and lets it go on, `times` times, and then each of its threads, as a debugger does. */
static int disturb_process(pid_t process, int times)
{
    char path[64], line[256];
    for (int i = 0; i < times; i++) {
        kill(process, SIGSTOP);
        snprintf(path, sizeof path, "/proc/%d/stat", process);
        for (char state = 0; state != 'T'; usleep(100)) {
            FILE *file = fopen(path, "r");
            if (!file || !fgets(line, sizeof line, file))
                return 1;
            fclose(file);
            state = strrchr(line, ')')[2];
        }
        kill(process, SIGCONT);
        usleep(2000);
    }
    snprintf(path, sizeof path, "/proc/%d/task", process);
    DIR *tasks = opendir(path);
    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        pid_t thread = atoi(task->d_name);
        if (thread == 0)
            continue;
        if (ptrace(PTRACE_ATTACH, thread, 0, 0) != 0 || waitpid(thread, NULL, __WALL) != thread ||
            ptrace(PTRACE_DETACH, thread, 0, 0) != 0)
            return 2;
    }
    return !tasks;
}

static void *sleeper(void *argument)
{
    (void)argument;
    install_filter();
    handled++;
    runner(NULL);
    return NULL;
}

/* A vCPU that sleeps under a filter of system calls, and threads of ours: the process may be stopped. */
static void stopped(void)
{
    with_chips = 1;
    make(HALT, sizeof HALT);
    struct sigaction action = { .sa_handler = count };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    int begin[2];
    CHECK(pipe(begin) == 0);
    pid_t process = getpid(), child = fork();
    if (child == 0) {
        char byte;
        _exit(read(begin[0], &byte, 1) != 1 ? 9 : disturb_process(process, 20));
    }
    /* Not known everywhere, and not needed there. */
    prctl(PR_SET_PTRACER, child, 0, 0, 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sleeper, NULL) == 0);
    while (handled == 0)
        usleep(100);
    usleep(10000);
    int result;
    CHECK(write(begin[1], "", 1) == 1);
    CHECK(waitpid(child, &result, 0) == child && result == 0);
    stop = 1;
    while (pthread_tryjoin_np(thread, NULL) != 0) {
        pthread_kill(thread, SIGUSR1);
        usleep(100);
    }
}

/* A child that has few system calls left may still set handlers, and use descriptors. */
static void filtered_child(void)
{
    make(HALT, sizeof HALT);
    pid_t child = fork();
    if (child == 0) {
        static const int ALLOWED[] = {
            SYS_rt_sigaction, SYS_write, SYS_exit_group, SYS_kill, SYS_dup, SYS_dup2, SYS_close, SYS_eventfd2, SYS_mmap,
        };
        enum { COUNT = sizeof ALLOWED / sizeof *ALLOWED };
        struct sock_filter lines[2 * COUNT + 2];
        unsigned n = 0;
        lines[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
        for (int i = 0; i < COUNT; i++) {
            lines[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ALLOWED[i], 0, 1);
            lines[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
        }
        lines[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
        struct sock_fprog program = { .len = n, .filter = lines };
        int own = getpid();
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) != 0)
            _exit(1);
        struct sigaction action = { .sa_handler = SIG_IGN }, before;
        if (sigaction(SIGWINCH, &action, NULL) != 0 || signal(SIGWINCH, count) != SIG_IGN ||
            sigaction(SIGWINCH, NULL, &before) != 0 || before.sa_handler != count ||
            syscall(SYS_rt_sigaction, SIGUSR2, NULL, &before, 8) != 0)
            _exit(2);
        if (signal(SIGUSR1, SIG_IGN) != SIG_DFL || kill(own, SIGUSR1) != 0)
            _exit(3);
        int bell = eventfd(0, 0), copy = dup(bell);
        if (bell < 0 || copy < 0 || dup2(bell, 99) != 99 || eventfd_write(copy, 1) != 0 || close(bell) != 0 || close(vcpu) != 0)
            _exit(4);
        if (mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
            _exit(5);
        _exit(0);
    }
    int result;
    CHECK(waitpid(child, &result, 0) == child);
    if (result != 0)
        fprintf(stderr, "the child's status is %#x\n", result);
    CHECK(result == 0);
}

static void *cancelled(void *argument)
{
    int *begun = argument;
    CHECK(pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL) == 0);
    __atomic_store_n(begun, 1, __ATOMIC_RELEASE);
    for (;;)
        if (ioctl(vcpu, KVM_RUN, 0) != 0)
            CHECK(errno == EINTR);
}

/* A thread that may be cancelled at any instruction ends, wherever it is; the vCPU can be used then. */
static void cancel(const uint8_t *code, size_t length, long times)
{
    make(code, length);
    unsigned seed = 1;
    for (long i = 0; i < times; i++) {
        pthread_t thread;
        void *result = NULL;
        int begun = 0;
        CHECK(pthread_create(&thread, NULL, cancelled, &begun) == 0);
        while (!__atomic_load_n(&begun, __ATOMIC_ACQUIRE)) {}
        for (volatile unsigned n = rand_r(&seed) % 30000; n > 0; n--) {}
        CHECK(pthread_cancel(thread) == 0);
        CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    }
    struct kvm_regs regs;
    CHECK(ioctl(vcpu, KVM_GET_REGS, &regs) == 0);
}

/* A VMM that takes a page from the guest: as with KVM the guest's access is EFAULT, and no handler learns of it. The VMM's own is one of its handler. */
static void give(int signal, siginfo_t *info, void *context)
{
    (void)context;
    uintptr_t page = (uintptr_t)info->si_addr & ~4095ul;
    if (signal != SIGSEGV || page != (uintptr_t)memory + 0x5000 ||
        mprotect((void *)page, 4096, PROT_READ | PROT_WRITE) != 0 ||
        ioctl(kvm, KVM_GET_API_VERSION, 0) != 12)
        _exit(1);
    handled++;
}

static void faults(void)
{
    static const uint8_t STORE[] = { 0xa2, 0x00, 0x50, 0xe6, 0x10, 0xeb, 0xf9 }; /* 1: mov [0x5000], al; out 0x10, al; jmp 1b */
    make(STORE, sizeof STORE);
    struct sigaction action = { .sa_sigaction = give, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    for (int i = 0; i <= 100; i++) {
        CHECK(ioctl(vcpu, KVM_RUN, 0) == 0 && run->exit_reason == KVM_EXIT_IO);
        CHECK(mprotect(memory + 0x5000, 4096, PROT_NONE) == 0);
        CHECK(ioctl(vcpu, KVM_RUN, 0) == -1 && errno == EFAULT);
        CHECK(handled == (uint64_t)i);
        *(volatile uint8_t *)(memory + 0x5000) = 1;
        CHECK(handled == (uint64_t)i + 1);
    }
}

/* A VMM that adds its bits to what it finds where an IN's bytes belong, as gokvm does, finds none. */
static void input(void)
{
    static const uint8_t CODE[] = {
        0x66, 0xb8, 0xff, 0xff, 0xff, 0xff, /* mov eax, -1 */
        0xe6, 0x10, 0xe4, 0x10,             /* out 0x10, al; in al, 0x10 */
        0xe7, 0x10, 0xe5, 0x10,             /* the same with ax, */
        0x66, 0xe7, 0x10, 0x66, 0xe5, 0x10, /* and eax */
        0xbf, 0x00, 0x50, 0xb9, 0x03, 0x00, /* mov di, 0x5000; mov cx, 3 */
        0xba, 0x10, 0x00, 0xf3, 0x6c,       /* mov dx, 0x10; rep insb */
        0xa1, 0x00, 0x90,                   /* mov ax, [0x9000], where nothing is */
        0xf4,
    };
    make(CODE, sizeof CODE);
    struct kvm_userspace_memory_region region = {
        .memory_size = 0x8000, .userspace_addr = (uintptr_t)memory,
    };
    CHECK(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &(struct kvm_userspace_memory_region){ 0 }) == 0);
    CHECK(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
    int ins = 0;
    for (;;) {
        CHECK(ioctl(vcpu, KVM_RUN, 0) == 0);
        if (run->exit_reason == KVM_EXIT_MMIO) {
            CHECK(!run->mmio.is_write && run->mmio.len == 2);
            for (int i = 0; i < 8; i++)
                CHECK(run->mmio.data[i] == 0);
            continue;
        }
        if (run->exit_reason == KVM_EXIT_HLT)
            break;
        CHECK(run->exit_reason == KVM_EXIT_IO && run->io.port == 0x10);
        uint8_t *data = (uint8_t *)run + run->io.data_offset;
        for (uint32_t i = 0; i < run->io.size * run->io.count; i++) {
            CHECK(run->io.direction == KVM_EXIT_IO_OUT || data[i] == 0);
            data[i] |= 0x5a;
        }
        ins += run->io.direction == KVM_EXIT_IO_IN;
    }
    CHECK(ins >= 4 && memcmp(memory + 0x5000, "\x5a\x5a\x5a", 3) == 0);
}

/* What an exit costs. */
static void exits(long times)
{
    make(PORT, sizeof PORT);
    for (int warm = 1; warm >= 0; warm--) {
        uint64_t start = now();
        for (long i = 0; i < times; i++)
            CHECK(ioctl(vcpu, KVM_RUN, 0) == 0);
        if (!warm)
            printf("%.0f ns\n", (double)(now() - start) / times);
    }
}

int main(int argc, char **argv)
{
    long times = argc > 2 ? atol(argv[2]) : 10000;
    const char *mode = argc > 1 ? argv[1] : "";
    if (!strcmp(mode, "spin")) kick(SPIN, sizeof SPIN, times, 0);
    else if (!strcmp(mode, "port")) kick(PORT, sizeof PORT, times, 0);
    else if (!strcmp(mode, "halt")) with_chips = 1, kick(HALT, sizeof HALT, times, 0);
    else if (!strcmp(mode, "sender")) sender(times);
    else if (!strcmp(mode, "mask")) kick(SPIN, sizeof SPIN, times, 1);
    else if (!strcmp(mode, "default")) kick(SPIN, sizeof SPIN, times, 2);
    else if (!strcmp(mode, "default-halt")) with_chips = 1, kick(HALT, sizeof HALT, times, 2);
    else if (!strcmp(mode, "cancel")) cancel(SPIN, sizeof SPIN, times);
    else if (!strcmp(mode, "cancel-halt")) with_chips = 1, cancel(HALT, sizeof HALT, times);
    else if (!strcmp(mode, "immediate")) immediate(times);
    else if (!strcmp(mode, "handlers")) handlers();
    else if (!strcmp(mode, "nested")) nested(times);
    else if (!strcmp(mode, "nested-calls")) nested_calls(times);
    else if (!strcmp(mode, "descriptors")) descriptors(argv[0]);
    else if (!strcmp(mode, "seccomp")) seccomp();
    else if (!strcmp(mode, "seccomp-steal")) { shares = 1; seccomp(); }
    else if (!strcmp(mode, "seccomp-all")) { for_all = 1; seccomp(); }
    else if (!strcmp(mode, "seccomp-chips")) { with_chips = 1; seccomp(); }
    else if (!strcmp(mode, "seccomp-chips-all")) { with_chips = for_all = 1; seccomp(); }
    else if (!strcmp(mode, "stopped")) stopped();
    else if (!strcmp(mode, "filtered-child")) filtered_child();
    else if (!strcmp(mode, "faults")) faults();
    else if (!strcmp(mode, "input")) input();
    else if (!strcmp(mode, "exits")) exits(times);
    else if (!strcmp(mode, "inherited")) return ioctl(9, KVM_GET_API_VERSION, 0) != 12 || ioctl(9, KVM_CREATE_VM, 0) < 0;
    else return 2;
    return 0;
}
