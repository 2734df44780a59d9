/*
 * Children, threads and other programs that a program starts while signals come in at any instruction. Each mode ends with 0, or
 * prints what is wrong and ends with 1.
 */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static volatile sig_atomic_t counted;
static pthread_t target;
static volatile int over;
static long times;

static void count(int signal)
{
    (void)signal;
    counted = 1;
}

static void *send_alarms(void *unused)
{
    (void)unused;
    while (!over)
        pthread_kill(target, SIGALRM);
    return NULL;
}

static void *nothing(void *unused)
{
    return unused;
}

/* The kernel reads the arguments of a program that it could execute. */
static void fails(void)
{
    char *bad[] = { "name", (char *)8, NULL };
    CHECK(syscall(SYS_execve, "/proc/self/exe", bad, NULL) == -1 && errno == EFAULT);
    CHECK(syscall(SYS_execve, "/bin/true", (char **)8, NULL) == -1 && errno == EFAULT);
    CHECK(syscall(SYS_execveat, AT_FDCWD, "/bin/true", (char **)8, NULL, 0) == -1 && errno == EFAULT);
}

static void wait_for(pid_t child)
{
    int status;
    pid_t waited;
    while ((waited = waitpid(child, &status, 0)) < 0 && errno == EINTR)
        ;
    CHECK(child > 0 && waited == child && status == 7 << 8);
}

/* Each of them once, from a handler on a stack of its own. */
static void start(long round)
{
    pid_t child;
    pthread_t thread;
    switch (round % 4) {
    case 0:
        child = fork();
        if (child == 0)
            _exit(7);
        wait_for(child);
        break;
    case 1:
        child = vfork();
        if (child == 0)
            _exit(7);
        wait_for(child);
        break;
    case 2:
        CHECK(pthread_create(&thread, NULL, nothing, NULL) == 0 && pthread_join(thread, NULL) == 0);
        break;
    default:
        fails();
    }
}

static void starts(int signal)
{
    (void)signal;
    volatile uint8_t mine[4096];
    for (size_t i = 0; i < sizeof mine; i++)
        mine[i] = (uint8_t)i;
    for (long n = 0; n < times || !counted; n++) {
        start(n);
        for (size_t i = 0; i < sizeof mine; i++)
            CHECK(mine[i] == (uint8_t)i);
    }
}

/* The frame of a handler that starts them is its own. */
static void frames(void)
{
    stack_t stack = { .ss_sp = malloc(128 << 10), .ss_size = 128 << 10 };
    CHECK(stack.ss_sp && sigaltstack(&stack, NULL) == 0);
    struct sigaction start_there = { .sa_handler = starts, .sa_flags = SA_ONSTACK };
    struct sigaction count_there = { .sa_handler = count, .sa_flags = SA_ONSTACK | SA_RESTART };
    CHECK(sigaction(SIGUSR1, &start_there, NULL) == 0 && sigaction(SIGALRM, &count_there, NULL) == 0);
    target = pthread_self();
    pthread_t sender;
    CHECK(pthread_create(&sender, NULL, send_alarms, NULL) == 0);
    CHECK(raise(SIGUSR1) == 0);
    over = 1;
    CHECK(pthread_join(sender, NULL) == 0);
    sigset_t mask;
    CHECK(sigprocmask(SIG_BLOCK, NULL, &mask) == 0 && !sigismember(&mask, SIGALRM));
}

/* Another program has the mask that this one had, whatever came in meanwhile. */
static void masks(const char *name)
{
    struct sigaction action = { .sa_handler = count };
    CHECK(sigaction(SIGURG, &action, NULL) == 0);
    for (long n = 0; n < times; n++) {
        pid_t child = n % 2 ? vfork() : fork();
        CHECK(child >= 0);
        if (child == 0) {
            /* By its parent, which vfork would keep. */
            if (n % 2)
                raise(SIGURG);
            execl(name, name, "mask", NULL);
            _exit(1);
        }
        int status = 0;
        pid_t waited;
        while ((waited = waitpid(child, &status, WNOHANG)) == 0)
            kill(child, SIGURG);
        CHECK(waited == child && status == 7 << 8);
    }
}

static int mask(void)
{
    sigset_t mask;
    CHECK(sigprocmask(SIG_BLOCK, NULL, &mask) == 0);
    for (int signal = 1; signal < 32; signal++)
        CHECK(!sigismember(&mask, signal));
    return 7;
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    times = argc > 2 ? atol(argv[2]) : 100;
    if (strcmp(mode, "mask") == 0)
        return mask();
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    CHECK(kvm >= 0 && ioctl(kvm, KVM_GET_API_VERSION, 0) == 12);
    if (strcmp(mode, "frames") == 0)
        frames();
    else if (strcmp(mode, "masks") == 0)
        masks(argc > 3 ? argv[3] : argv[0]);
    else
        return 2;
    return 0;
}
