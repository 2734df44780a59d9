/*
 * Memory of a guest that the VMM takes away and gives back, for `anykvm exec`: KVM_RUN gives EFAULT for an access that is not
 * allowed, before the instruction, which is made once the access is. Ends with 0 if so.
 *
 *     memory calls         each system call that takes memory away, between two KVM_RUNs
 *     memory running N     the same under N vCPUs that run
 *     memory toggle N M    rights that change M times under N vCPUs that write
 *     memory toggle N M harvest    the same while a thread takes the dirty log
 *     memory toggle N M clock      the same while the vCPUs have kvmclock's wall time written as well
 */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { PAGE = 4096, PAGES = 16, DATA = 0x20000, CPUS = 2 };
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif
#ifndef KVM_EXIT_MEMORY_FAULT
#define KVM_EXIT_MEMORY_FAULT 39
#define KVM_CAP_MEMORY_FAULT_INFO 232
#endif

static int kvm, vm;
/* What is under the guest's DATA: a file, which is also seen elsewhere. */
static uint8_t *data, *view;
static int file;

static unsigned slot_flags;

static void set_slot(int slot, uint64_t gpa, void *memory, uint64_t size)
{
    struct kvm_userspace_memory_region region = {
        .slot = slot,
        .flags = slot_flags,
        .guest_phys_addr = gpa,
        .memory_size = size,
        .userspace_addr = (uintptr_t)memory,
    };
    CHECK(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
}

static struct kvm_run *new_vcpu(int id, int *vcpu)
{
    *vcpu = ioctl(vm, KVM_CREATE_VCPU, id);
    CHECK(*vcpu >= 0);
    int size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    struct kvm_run *run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, *vcpu, 0);
    CHECK(run != MAP_FAILED);
    return run;
}

static uint64_t rip(int vcpu)
{
    struct kvm_regs regs;
    CHECK(ioctl(vcpu, KVM_GET_REGS, &regs) == 0);
    return regs.rip;
}

/* Tells the byte at DATA, and adds one to it. */
static const uint8_t CODE[] = {
    0xb8, 0x00, 0x20, 0x8e, 0xc0, /* mov ax, 0x2000; mov es, ax */
    0x26, 0xa0, 0x00, 0x00,       /* READ: mov al, es:[0] */
    0xe6, 0x10,                   /* out 0x10, al */
    0x26, 0xfe, 0x06, 0x00, 0x00, /* WRITE: inc byte es:[0] */
    0xe6, 0x11,                   /* out 0x11, al */
    0xeb, 0xf1,                   /* jmp READ */
};
enum { READ = 0x1005, WRITE = 0x100b };

static int vcpu;
static struct kvm_run *run;

/* Runs to the read's or the write's end. */
static void goes_on(int port, int value)
{
    CHECK(ioctl(vcpu, KVM_RUN, 0) == 0 && run->exit_reason == KVM_EXIT_IO && run->io.port == port);
    uint8_t told = ((uint8_t *)run)[run->io.data_offset];
    if (told != value)
        fprintf(stderr, "%d, not %d\n", told, value);
    CHECK(told == value);
}

/* The page that an EFAULT is about. */
static uint64_t fault_page(const struct kvm_run *of)
{
    struct memory_fault {
        uint64_t flags, gpa, size;
    } fault;
    memcpy(&fault, &of->io, sizeof fault);
    CHECK(of->exit_reason == KVM_EXIT_MEMORY_FAULT);
    CHECK(fault.flags == 0 && fault.size == PAGE);
    return fault.gpa;
}

static void faults_at(uint64_t at, uint64_t page)
{
    for (int n = 0; n < 3; n++) {
        CHECK(ioctl(vcpu, KVM_RUN, 0) == -1 && errno == EFAULT);
        CHECK(rip(vcpu) == at);
        CHECK(fault_page(run) == page);
    }
}

/* Neither reads nor writes; gives the memory back by `call`, after which the guest reads `value`. */
#define IS_AWAY(call, value)           \
    do {                               \
        int told = value;              \
        faults_at(READ, DATA);         \
        CHECK(call);                   \
        goes_on(0x10, told);           \
        goes_on(0x11, told);           \
    } while (0)

static void calls(void)
{
    int value = 100, size = PAGES * PAGE, both = PROT_READ | PROT_WRITE;
    data[0] = value;
    run = new_vcpu(0, &vcpu);
    start_at_0x1000(vcpu);
    goes_on(0x10, value);
    goes_on(0x11, value++);
    /* Reads go on where writes may not. */
    CHECK(mprotect(data, size, PROT_READ) == 0);
    goes_on(0x10, value);
    faults_at(WRITE, DATA);
    CHECK(data[0] == value);
    CHECK(mprotect(data, PAGE, both) == 0);
    goes_on(0x11, value++);
    CHECK(data[0] == value);
    CHECK(mprotect(data, size, PROT_NONE) == 0);
    IS_AWAY(mprotect(data, size, both) == 0, value++);
    /* Of other pages nothing is to be seen. */
    CHECK(mprotect(data + PAGE, size - PAGE, PROT_NONE) == 0);
    goes_on(0x10, value);
    goes_on(0x11, value++);
    CHECK(mprotect(data + PAGE, size - PAGE, both) == 0);
    CHECK(syscall(SYS_mprotect, data, PAGE, PROT_NONE) == 0);
    IS_AWAY(syscall(SYS_mprotect, data, PAGE, both) == 0, value++);
    CHECK(pkey_mprotect(data, PAGE, PROT_NONE, -1) == 0);
    IS_AWAY(pkey_mprotect(data, PAGE, both, -1) == 0, value++);
    /* A call that fails changes nothing. */
    CHECK(mprotect(data + 1, PAGE, PROT_NONE) == -1 && errno == EINVAL);
    CHECK(munmap(data + 1, PAGE) == -1 && errno == EINVAL);
    goes_on(0x10, value);
    goes_on(0x11, value++);
    /* The file is shared: what is mapped again is the same. */
    CHECK(munmap(data, size) == 0);
    IS_AWAY(mmap(data, size, both, MAP_SHARED | MAP_FIXED, file, 0) == data, value++);
    CHECK(mmap(data, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == data);
    IS_AWAY(mmap(data, PAGE, both, MAP_SHARED | MAP_FIXED, file, 0) == data, value++);
    /* Another page in its place is found at once. */
    CHECK(mmap(data, PAGE, both, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == data);
    goes_on(0x10, 0);
    goes_on(0x11, 0);
    CHECK(data[0] == 1);
    CHECK(mmap(data, PAGE, both, MAP_SHARED | MAP_FIXED, file, 0) == data);
    goes_on(0x10, value);
    goes_on(0x11, value++);
    uint8_t *other = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(other != MAP_FAILED);
    CHECK(mremap(data, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, other) == other && other[0] == value);
    IS_AWAY(mremap(other, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, data) == data, value++);
    /* A file that becomes shorter, and longer again, begins with zeros. */
    CHECK(ftruncate(file, 0) == 0);
    IS_AWAY(ftruncate(file, size) == 0, 0);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    CHECK(truncate(path, 0) == 0);
    IS_AWAY(truncate(path, size) == 0, 0);
    value = 1;
    /* The guest's code: it is fetched no more, and is the same afterwards. */
    set_slot(0, 0, NULL, 0);
    memcpy(data + PAGE, CODE, sizeof CODE);
    uint8_t *low = data - 2 * PAGE;
    memcpy(low + 0x1000, CODE, sizeof CODE);
    set_slot(0, 0, low, 2 * PAGE);
    goes_on(0x10, value);
    CHECK(mprotect(low + PAGE, PAGE, PROT_NONE) == 0);
    faults_at(WRITE, 0x1000);
    CHECK(mprotect(low + PAGE, PAGE, PROT_READ) == 0);
    goes_on(0x11, value++);
    goes_on(0x10, value);
    /* What a file does not have is no memory. */
    int shm = shmget(IPC_PRIVATE, size, IPC_CREAT | 0600);
    CHECK(shm >= 0 && munmap(data, size) == 0 && shmat(shm, data, 0) == data);
    shmctl(shm, IPC_RMID, NULL);
    goes_on(0x11, value);
    CHECK(data[0] == 1 && shmdt(data) == 0);
    faults_at(READ, DATA);
    CHECK(mmap(data, size, both, MAP_SHARED | MAP_FIXED, file, 0) == data);
    goes_on(0x10, value);
    goes_on(0x11, value);
    /* Linux 6.13; before, there is no such advice. */
    CHECK(mmap(data, PAGE, both, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == data);
    if (madvise(data, PAGE, MADV_GUARD_INSTALL) == 0)
        IS_AWAY(madvise(data, PAGE, MADV_GUARD_REMOVE) == 0, 0);
    else
        CHECK(errno == EINVAL);
    /* A child's memory is another. */
    int child = fork();
    if (child == 0) {
        munmap(data, size);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(ioctl(vcpu, KVM_RUN, 0) == 0);
    /* A slot that is gone concerns nobody. */
    set_slot(1, DATA, NULL, 0);
    CHECK(munmap(data, size) == 0);
}

/* Counts in a register and in the page that CX says. */
static const uint8_t COUNTING[] = {
    0x8e, 0xc1,                               /* mov es, cx */
    0x66, 0x31, 0xdb,                         /* xor ebx, ebx */
    0x66, 0x43,                               /* 1: inc ebx */
    0x26, 0x66, 0x83, 0x06, 0x00, 0x00, 0x01, /* add dword es:[0], 1 */
    0x26, 0x66, 0xa1, 0x04, 0x00,             /* mov eax, es:[4]: always 0 */
    0x66, 0x01, 0xc3,                         /* add ebx, eax */
    0x66, 0xb9, 0x00, 0x4d, 0x56, 0x4b,       /* CLOCK: mov ecx, MSR_KVM_WALL_CLOCK_NEW */
    0x66, 0x89, 0xf0,                         /* mov eax, esi */
    0x66, 0x31, 0xd2,                         /* xor edx, edx */
    0x0f, 0x30,                               /* wrmsr */
    0xeb, 0xdf,                               /* jmp 1b */
};
/* At CLOCK, where no clock is asked for: jmp 1b. */
static const uint8_t GOES_ON[] = { 0xeb, 0xed };
enum { ADD = 0x1007, CLOCK = 0x1016 };

static struct cpu {
    int number, fd;
    struct kvm_run *run;
    pthread_t thread;
    /* Times that KVM_RUN gave EFAULT. */
    volatile unsigned faults;
    /* It waits until this is another. */
    volatile unsigned rounds;
} cpus[CPUS];
static volatile unsigned round_now, over;
static int count, waits;

static volatile uint32_t *counter(struct cpu *cpu)
{
    return (volatile uint32_t *)(view + cpu->number * PAGE);
}

static void check_counts(struct cpu *cpu)
{
    struct kvm_regs regs;
    CHECK(ioctl(cpu->fd, KVM_GET_REGS, &regs) == 0);
    /* Stopped at any instruction: counted in the register, maybe not yet in memory. */
    uint32_t told = regs.rbx, written = *counter(cpu);
    int is_between = regs.rip <= ADD && regs.rip > 0x1005;
    if (written + is_between != told)
        fprintf(stderr, "%u counted, %u written, at %llx\n", told, written, regs.rip);
    CHECK(written + is_between == told);
}

static void kick(int signal)
{
    (void)signal;
}

static void *running(void *of)
{
    struct cpu *cpu = of;
    start_at_0x1000(cpu->fd);
    struct kvm_regs regs = {
        .rip = 0x1000,
        .rflags = 2,
        .rcx = (DATA + cpu->number * PAGE) >> 4,
        .rsi = DATA + (CPUS + cpu->number) * PAGE,
    };
    CHECK(ioctl(cpu->fd, KVM_SET_REGS, &regs) == 0);
    while (!over) {
        int result = ioctl(cpu->fd, KVM_RUN, 0);
        CHECK(result == -1 && (errno == EFAULT || errno == EINTR));
        if (errno == EFAULT) {
            CHECK(fault_page(cpu->run) == (uint64_t)DATA + cpu->number * PAGE);
            cpu->faults++;
            if (waits) {
                unsigned now = round_now;
                CHECK(rip(cpu->fd) == ADD);
                check_counts(cpu);
                cpu->rounds = now;
                while (round_now == now && !over)
                    usleep(50);
            }
        }
    }
    return NULL;
}

static void start(int number)
{
    signal(SIGUSR1, kick);
    count = number;
    memset(view, 0, PAGES * PAGE);
    for (int n = 0; n < count; n++) {
        cpus[n].number = n;
        cpus[n].run = new_vcpu(n, &cpus[n].fd);
        CHECK(pthread_create(&cpus[n].thread, NULL, running, &cpus[n]) == 0);
    }
}

static void end(void)
{
    over = 1;
    for (int n = 0; n < count; n++) {
        cpus[n].run->immediate_exit = 1;
        while (pthread_tryjoin_np(cpus[n].thread, NULL) != 0) {
            pthread_kill(cpus[n].thread, SIGUSR1);
            usleep(1000);
        }
        check_counts(&cpus[n]);
    }
}

/* All count on. */
static void wait_for_progress(void)
{
    for (int n = 0; n < count; n++) {
        uint32_t before = *counter(&cpus[n]);
        while (*counter(&cpus[n]) - before < 1000)
            usleep(50);
    }
}

static void under_running(int number, int rounds)
{
    int size = PAGES * PAGE, both = PROT_READ | PROT_WRITE;
    waits = 1;
    round_now = 1;
    start(number);
    for (int n = 0; n < rounds; n++) {
        wait_for_progress();
        int kind = n % 3;
        if (kind == 0)
            CHECK(mprotect(data, size, PROT_READ) == 0);
        else if (kind == 1)
            CHECK(munmap(data, size) == 0);
        else
            CHECK(mprotect(data, size, PROT_NONE) == 0);
        for (int i = 0; i < count; i++)
            while (cpus[i].rounds != round_now)
                usleep(50);
        uint32_t seen[CPUS];
        for (int i = 0; i < count; i++)
            seen[i] = *counter(&cpus[i]);
        usleep(500);
        for (int i = 0; i < count; i++)
            CHECK(seen[i] == *counter(&cpus[i]));
        if (kind == 1)
            CHECK(mmap(data, size, both, MAP_SHARED | MAP_FIXED, file, 0) == data);
        else
            CHECK(mprotect(data, size, both) == 0);
        round_now++;
    }
    wait_for_progress();
    round_now++;
    end();
}

static void *harvesting(void *unused)
{
    (void)unused;
    uint64_t bitmap[(PAGES + 63) / 64];
    struct kvm_dirty_log log = { .slot = 1, .dirty_bitmap = bitmap };
    while (!over)
        CHECK(ioctl(vm, KVM_GET_DIRTY_LOG, &log) == 0);
    return NULL;
}

static void toggle(int number, int times)
{
    int both = PROT_READ | PROT_WRITE;
    start(number);
    pthread_t harvester;
    if (slot_flags != 0)
        CHECK(pthread_create(&harvester, NULL, harvesting, NULL) == 0);
    wait_for_progress();
    for (int n = 0; n < times; n++) {
        int one = n % 3 == 2;
        CHECK(mprotect(data, one ? PAGE : PAGES * PAGE, n % 5 == 4 ? PROT_NONE : PROT_READ) == 0);
        if (n % 7 == 6)
            usleep(20);
        if (n % 11 == 10)
            CHECK(mmap(data, PAGES * PAGE, both, MAP_SHARED | MAP_FIXED, file, 0) == data);
        CHECK(mprotect(data, PAGES * PAGE, both) == 0);
        if (n % 64 == 0)
            wait_for_progress();
    }
    wait_for_progress();
    end();
    if (slot_flags != 0)
        CHECK(pthread_join(harvester, NULL) == 0);
    unsigned faults = 0;
    for (int n = 0; n < count; n++)
        faults += cpus[n].faults;
    fprintf(stderr, "%u faults\n", faults);
}

int main(int arguments, char **argument)
{
    CHECK(arguments >= 2);
    kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    CHECK(kvm >= 0);
    vm = ioctl(kvm, KVM_CREATE_VM, 0);
    CHECK(vm >= 0);
    CHECK(ioctl(vm, KVM_CHECK_EXTENSION, KVM_CAP_MEMORY_FAULT_INFO) == 1);
    int size = PAGES * PAGE;
    file = memfd_create("guest", MFD_CLOEXEC);
    CHECK(file >= 0 && ftruncate(file, size) == 0);
    uint8_t *all = mmap(NULL, size + 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED);
    data = all + 4 * PAGE;
    CHECK(mmap(data, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == data);
    view = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(view != MAP_FAILED);
    int is_calls = strcmp(argument[1], "calls") == 0;
    memcpy(all + 0x1000, is_calls ? CODE : COUNTING, is_calls ? sizeof CODE : sizeof COUNTING);
    const char *also = arguments > 4 ? argument[4] : "";
    if (!is_calls && strcmp(also, "clock") != 0)
        memcpy(all + CLOCK, GOES_ON, sizeof GOES_ON);
    set_slot(0, 0, all, 2 * PAGE);
    if (strcmp(also, "harvest") == 0)
        slot_flags = KVM_MEM_LOG_DIRTY_PAGES;
    set_slot(1, DATA, data, size);
    if (is_calls)
        calls();
    else if (strcmp(argument[1], "running") == 0)
        under_running(atoi(argument[2]), 60);
    else
        toggle(atoi(argument[2]), atoi(argument[3]));
    return 0;
}
