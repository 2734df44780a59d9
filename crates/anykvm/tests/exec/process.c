/*
 * What a process does besides KVM calls, for programs that `anykvm exec` launches: threads, children,
 * memory, its own file, registers over a system call. It prints what is wrong and ends with 1.
 */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>

extern char **environ;
static int kvm;
static __thread int own = 7;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int counter;

/* A system call that is not the kernel's changes rax, rcx and r11 only, and nothing below rsp. */
static void registers(void)
{
    uint64_t in[4] __attribute__((aligned(32))) = { 1, 2, 3, 4 }, out[4] __attribute__((aligned(32)));
    for (int i = 0; i < 1000; i++) {
        uint64_t result, flags, red, kept[10];
        __asm__ volatile(
            "movdqu %[in], %%xmm7\n movdqu 16+%[in], %%xmm15\n"
            "mov $0x1111, %%rbx\n mov $0x2222, %%r8\n mov $0x3333, %%r9\n mov $0x4444, %%r10\n"
            "mov $0x5555, %%r12\n mov $0x6666, %%r13\n mov $0x7777, %%r14\n mov $0x8888, %%r15\n"
            "movq $0x9999, -64(%%rsp)\n"
            "mov $16, %%eax\n xor %%edx, %%edx\n stc\n std\n"
            "syscall\n"
            "cld\n jc 1f\n ud2\n 1:\n"
            "mov %%rbx, 0+%[kept]\n mov %%r8, 8+%[kept]\n mov %%r9, 16+%[kept]\n mov %%r10, 24+%[kept]\n"
            "mov %%r12, 32+%[kept]\n mov %%r13, 40+%[kept]\n mov %%r14, 48+%[kept]\n mov %%r15, 56+%[kept]\n"
            "mov %%rdx, 64+%[kept]\n mov -64(%%rsp), %%rcx\n mov %%rcx, %[red]\n"
            "movdqu %%xmm7, %[out]\n movdqu %%xmm15, 16+%[out]\n"
            : "=&a"(result), [kept] "=m"(kept), [red] "=m"(red), [out] "=m"(out)
            : [in] "m"(in), "D"((long)kvm), "S"((long)KVM_GET_API_VERSION)
            : "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc",
              "xmm7", "xmm15");
        (void)flags;
        CHECK(result == 12 && red == 0x9999 && !memcmp(in, out, sizeof in));
        for (int r = 0; r < 8; r++)
            CHECK(kept[r] == 0x1111ull * (r + 1));
        CHECK(kept[8] == 0);
    }
}

static void *thread(void *argument)
{
    CHECK(own == 7);
    own = (int)(intptr_t)argument;
    for (int i = 0; i < 1000; i++) {
        pthread_mutex_lock(&mutex);
        counter++;
        pthread_mutex_unlock(&mutex);
        CHECK(i % 100 || ioctl(kvm, KVM_GET_API_VERSION, 0) == 12);
    }
    CHECK(own == (int)(intptr_t)argument);
    return argument;
}

static void threads(void)
{
    for (int round = 0; round < 50; round++) {
        pthread_t all[8];
        for (intptr_t i = 0; i < 8; i++)
            CHECK(pthread_create(&all[i], NULL, thread, (void *)i) == 0);
        for (intptr_t i = 0; i < 8; i++) {
            void *result;
            CHECK(pthread_join(all[i], &result) == 0 && result == (void *)i);
        }
    }
    CHECK(counter == 50 * 8 * 1000 && own == 7);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (intptr_t i = 0; i < 50; i++) {
        pthread_t id;
        CHECK(pthread_create(&id, &detached, thread, (void *)i) == 0);
    }
    for (;;) {
        pthread_mutex_lock(&mutex);
        int done = counter == 50 * 9 * 1000;
        pthread_mutex_unlock(&mutex);
        if (done)
            break;
        usleep(1000);
    }
}

static int finish(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void children(const char *self)
{
    for (volatile int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            /* A child has threads of its own, and may open what its parent did not. */
            pthread_t id;
            if (pthread_create(&id, NULL, thread, (void *)1) || pthread_join(id, NULL))
                _exit(1);
            int again = open("/dev/kvm", O_RDWR);
            _exit(again < 0 || ioctl(again, KVM_CREATE_VM, 0) < 0 ? 1 : 5);
        }
        CHECK(finish(child) == 5);
        child = vfork();
        if (child == 0)
            _exit(6);
        CHECK(finish(child) == 6);
        child = vfork();
        if (child == 0) {
            execl("/bin/sh", "sh", "-c", "exit 7", NULL);
            _exit(1);
        }
        CHECK(finish(child) == 7);
        char *arguments[] = { (char *)self, "child", NULL };
        CHECK(posix_spawn(&child, self, NULL, NULL, arguments, environ) == 0);
        CHECK(finish(child) == 8);
        CHECK(WEXITSTATUS(system("exit 9")) == 9);
    }
    /* Namespaces and the like are asked for by flags. */
    pid_t child = syscall(SYS_clone, CLONE_FS | SIGCHLD, 0, 0, 0, 0);
    if (child == 0)
        _exit(ioctl(kvm, KVM_GET_API_VERSION, 0) == 12 ? 10 : 1);
    CHECK(finish(child) == 10);
}

static void files(const char *self)
{
    char path[4096], again[4096];
    ssize_t len = readlink("/proc/self/exe", path, sizeof path - 1);
    CHECK(len > 0);
    path[len] = 0;
    CHECK(realpath(self, again) && !strcmp(path, again));
    int fd = open("/proc/self/exe", O_RDONLY);
    char magic[4];
    CHECK(fd >= 0 && read(fd, magic, 4) == 4 && !memcmp(magic, "\177ELF", 4));
    CHECK(open((char *)8, O_RDONLY) == -1 && errno == EFAULT);
    CHECK(open("/nonexistent", O_RDONLY) == -1 && errno == ENOENT);
    CHECK(syscall(SYS_ioctl, -1, KVM_GET_API_VERSION, 0) == -1 && errno == EBADF);
    CHECK(syscall(100000) == -1 && errno == ENOSYS);
}

static void memory(void)
{
    char *end = (char *)syscall(SYS_brk, 0), *more = end + (1 << 20);
    CHECK((char *)syscall(SYS_brk, more) == more);
    memset(end, 1, 1 << 20);
    CHECK((char *)syscall(SYS_brk, end) == end && (char *)syscall(SYS_brk, more) == more);
    for (int i = 0; i < 1 << 20; i += 4096)
        CHECK(end[i] == 0);
}

static volatile sig_atomic_t seen, on_stack;
static char stack[64 << 10];
static void handler(int signal, siginfo_t *info, void *context)
{
    (void)context;
    char here;
    on_stack = &here >= stack && &here < stack + sizeof stack;
    seen = signal == SIGUSR1 && own == 7 && info->si_code == SI_TKILL;
}

static void signals(void)
{
    stack_t alternate = { .ss_sp = stack, .ss_size = sizeof stack };
    CHECK(sigaltstack(&alternate, NULL) == 0);
    struct sigaction action = { .sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK };
    sigfillset(&action.sa_mask);
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    sigset_t set, old;
    sigfillset(&set);
    for (int i = 0; i < 1000; i++) {
        CHECK(pthread_sigmask(SIG_BLOCK, &set, &old) == 0);
        CHECK(!sigismember(&old, SIGUSR1));
        seen = 0;
        CHECK(pthread_kill(pthread_self(), SIGUSR1) == 0 && !seen);
        sigset_t pending;
        CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1));
        CHECK(pthread_sigmask(SIG_SETMASK, &old, NULL) == 0);
        CHECK(seen && on_stack);
    }
    CHECK(signal(SIGPIPE, SIG_IGN) == SIG_DFL);
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "child"))
        return open("/dev/kvm", O_RDWR) >= 0 ? 8 : 1;
    kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    CHECK(kvm >= 0);
    registers();
    files(argv[0]);
    memory();
    signals();
    threads();
    children(argv[0]);
    printf("%s\n", getenv("HOME") ? "all well" : "no environment");
    return 0;
}
