/*
 * Writes to the eventfds of irqfds, for `anykvm exec`: delivered when the write returns, by whatever
 * way it came, with what a kernel makes of the counter. Ends with 0 if all is as it should be.
 */
#include "check.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

enum { GSI = 24, VECTOR = 0x51, LEVEL_PIN = 5 };

static int kvm, vm, vcpu;
static uint8_t *memory;
static struct kvm_run *run;

static void make(void)
{
    kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    CHECK(kvm >= 0);
    vm = ioctl(kvm, KVM_CREATE_VM, 0);
    CHECK(vm >= 0);
    memory = mmap(NULL, 0x10000, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    struct kvm_userspace_memory_region region = {
        .memory_size = 0x10000, .userspace_addr = (uintptr_t)memory,
    };
    CHECK(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
    CHECK(ioctl(vm, KVM_CREATE_IRQCHIP, 0) == 0);
    vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    CHECK(vcpu >= 0);
    run = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    CHECK(run != MAP_FAILED);
    /* The LAPIC is enabled by its spurious vector register. */
    struct kvm_lapic_state lapic;
    CHECK(ioctl(vcpu, KVM_GET_LAPIC, &lapic) == 0);
    *(uint32_t *)(lapic.regs + 0xf0) = 0x1ff;
    CHECK(ioctl(vcpu, KVM_SET_LAPIC, &lapic) == 0);
    struct {
        struct kvm_irq_routing head;
        struct kvm_irq_routing_entry entries[2];
    } routes = { .head.nr = 2 };
    routes.entries[0] = (struct kvm_irq_routing_entry){
        .gsi = GSI, .type = KVM_IRQ_ROUTING_MSI,
        .u.msi = { .address_lo = 0xfee00000, .data = VECTOR },
    };
    routes.entries[1] = (struct kvm_irq_routing_entry){
        .gsi = LEVEL_PIN, .type = KVM_IRQ_ROUTING_IRQCHIP,
        .u.irqchip = { .irqchip = KVM_IRQCHIP_PIC_MASTER, .pin = LEVEL_PIN },
    };
    CHECK(ioctl(vm, KVM_SET_GSI_ROUTING, &routes) == 0);
}

static int assign(int fd, int flags)
{
    struct kvm_irqfd irqfd = { .fd = fd, .gsi = GSI, .flags = flags };
    return ioctl(vm, KVM_IRQFD, &irqfd);
}

/* Takes the interrupt back; 1 if there was one. */
static int taken(void)
{
    struct kvm_lapic_state lapic;
    CHECK(ioctl(vcpu, KVM_GET_LAPIC, &lapic) == 0);
    uint32_t *irr = (uint32_t *)(lapic.regs + 0x200 + 0x10 * (VECTOR / 32));
    uint32_t bit = 1u << VECTOR % 32;
    /* Set only if it was there: what is delivered between the two calls would be lost. */
    if (!(*irr & bit))
        return 0;
    *irr &= ~bit;
    CHECK(ioctl(vcpu, KVM_SET_LAPIC, &lapic) == 0);
    return 1;
}

/* As `taken`, for what another thread may still deliver. */
static int comes(void)
{
    for (int i = 0; i < 5000; i++) {
        if (taken())
            return 1;
        usleep(1000);
    }
    return 0;
}

static int tell(int fd)
{
    uint64_t one = 1;
    return write(fd, &one, sizeof one) == sizeof one;
}

/* The counter of a non-blocking eventfd. */
static uint64_t count(int fd)
{
    uint64_t value;
    return read(fd, &value, sizeof value) == sizeof value ? value : 0;
}

static void at_once(void)
{
    int fd = eventfd(0, EFD_NONBLOCK);
    uint64_t value = 3;
    CHECK(tell(fd) && count(fd) == 1);
    CHECK(assign(fd, 0) == 0 && !taken());
    for (int i = 0; i < 1000; i++)
        CHECK(tell(fd) && taken() && count(fd) == 0);
    CHECK(eventfd_write(fd, 7) == 0 && taken() && count(fd) == 0);
    CHECK(syscall(SYS_write, fd, &value, sizeof value) == 8 && taken() && count(fd) == 0);
    uint64_t two[2] = { 1, 1 };
    CHECK(write(fd, two, sizeof two) == 8 && taken());
    /* Nobody who polls sees it. */
    struct pollfd set = { .fd = fd, .events = POLLIN };
    CHECK(tell(fd) && poll(&set, 1, 0) == 0 && taken());
    /* What the kernel refuses. */
    CHECK(write(fd, &value, 4) == -1 && errno == EINVAL && !taken());
    value = ~0ull;
    CHECK(write(fd, &value, 8) == -1 && errno == EINVAL && !taken());
    void *volatile nowhere = (void *)8;
    CHECK(write(fd, nowhere, 8) == -1 && errno == EFAULT && !taken());
    /* By another way. */
    value = 1;
    struct iovec part = { &value, 8 };
    CHECK(writev(fd, &part, 1) == 8 && comes());
    int other = dup(fd);
    CHECK(tell(other) && comes());
    /* Over: the counter is the VMM's again. */
    CHECK(assign(fd, KVM_IRQFD_FLAG_DEASSIGN) == 0);
    CHECK(tell(fd) && tell(fd) && count(fd) == 2 && !taken());
    CHECK(assign(other, 0) == 0 && tell(other) && taken());
    CHECK(tell(fd) && comes());
    /* By another number than it was assigned by. */
    CHECK(assign(fd, KVM_IRQFD_FLAG_DEASSIGN) == 0);
    CHECK(tell(other) && tell(fd) && count(fd) == 2 && !taken());
    close(other);
    close(fd);
}

/* A number that is another file is not an irqfd's. */
static void numbers(void)
{
    int ends[2];
    char byte[16];
    CHECK(pipe(ends) == 0);
    for (int way = 0; way < 5; way++) {
        int fd = eventfd(0, EFD_NONBLOCK), kept = dup(fd);
        CHECK(assign(fd, 0) == 0 && tell(fd) && taken());
        switch (way) {
        case 0:
            close(fd);
            CHECK(dup(ends[1]) == fd);
            break;
        case 1:
            CHECK(dup2(ends[1], fd) == fd);
            break;
        case 2:
            CHECK(dup3(ends[1], fd, O_CLOEXEC) == fd);
            break;
        case 3:
            CHECK(syscall(SYS_close, fd) == 0);
            CHECK(fcntl(ends[1], F_DUPFD, fd) == fd);
            break;
        case 4:
            CHECK(syscall(SYS_close_range, fd, fd, 0) == 0);
            CHECK(syscall(SYS_dup2, ends[1], fd) == fd);
            break;
        }
        CHECK(tell(fd) && !taken());
        CHECK(read(ends[0], byte, sizeof byte) == 8);
        /* The eventfd lives by its other number. */
        CHECK(tell(kept) && comes());
        CHECK(assign(kept, KVM_IRQFD_FLAG_DEASSIGN) == 0);
        CHECK(tell(kept) && count(kept) == 1 && !taken());
        close(fd);
        close(kept);
    }
    /* A copy of itself changes nothing. */
    int fd = eventfd(0, EFD_NONBLOCK);
    CHECK(assign(fd, 0) == 0 && dup2(fd, fd) == fd && tell(fd) && taken());
    close(fd);
    close(ends[0]);
    close(ends[1]);
}

static void children(void)
{
    int fd = eventfd(0, EFD_NONBLOCK), status;
    CHECK(assign(fd, 0) == 0);
    pid_t child = fork();
    if (child == 0)
        _exit(!tell(fd));
    CHECK(waitpid(child, &status, 0) == child && status == 0 && comes());
    child = vfork();
    if (child == 0) {
        int told = tell(fd);
        close(fd);
        _exit(!told);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0 && comes());
    CHECK(tell(fd) && taken());
    close(fd);
}

/* With resampling the line stays up until the guest's EOI, by which the other eventfd is told. */
static void levels(void)
{
    int fd = eventfd(0, EFD_NONBLOCK), resample = eventfd(0, EFD_NONBLOCK);
    struct kvm_irqfd irqfd = {
        .fd = fd, .gsi = LEVEL_PIN, .flags = KVM_IRQFD_FLAG_RESAMPLE, .resamplefd = resample,
    };
    CHECK(ioctl(vm, KVM_IRQFD, &irqfd) == 0);
    static const uint8_t CODE[] = {
        0xb0, 0x11, 0xe6, 0x20, 0xb0, 0x20, 0xe6, 0x21, /* ICW1, ICW2: vectors from 0x20 on */
        0xb0, 0x04, 0xe6, 0x21, 0xb0, 0x01, 0xe6, 0x21, /* ICW3, ICW4 */
        0x30, 0xc0, 0xe6, 0x21,                         /* nothing masked */
        0xba, 0xd0, 0x04, 0xb0, 0x20, 0xee,             /* ELCR: IRQ 5 is a level */
        0xe6, 0x80,                                     /* out 0x80, al */
        0xfb, 0xf4, 0xeb, 0xfd,                         /* sti; 1: hlt; jmp 1b */
    };
    static const uint8_t HANDLER[] = {
        0xff, 0x06, 0x00, 0x70,                         /* inc word [0x7000] */
        0xb0, 0x20, 0xe6, 0x20,                         /* EOI */
        0xe6, 0x80, 0xcf,                               /* out 0x80, al: tells; iret */
    };
    memcpy(memory + 0x1000, CODE, sizeof CODE);
    memcpy(memory + 0x2000, HANDLER, sizeof HANDLER);
    *(uint32_t *)(memory + 4 * 0x25) = 0x2000;
    start_at_0x1000(vcpu);
    CHECK(ioctl(vcpu, KVM_RUN, 0) == 0 && run->exit_reason == KVM_EXIT_IO);
    for (int i = 1; i <= 500; i++) {
        CHECK(tell(fd) && count(fd) == 0);
        CHECK(ioctl(vcpu, KVM_RUN, 0) == 0);
        CHECK(run->exit_reason == KVM_EXIT_IO && run->io.port == 0x80);
        CHECK(*(uint16_t *)(memory + 0x7000) == i);
        CHECK(count(resample) == 1);
    }
    irqfd.flags = KVM_IRQFD_FLAG_DEASSIGN;
    CHECK(ioctl(vm, KVM_IRQFD, &irqfd) == 0);
    close(fd);
    close(resample);
}

static _Atomic int stop, target;
static _Atomic uint64_t told;

static void *teller(void *argument)
{
    (void)argument;
    while (!stop) {
        CHECK(tell(target));
        told++;
    }
    return NULL;
}

/* Assigned and deassigned while others write: no signal is lost between both. */
static void races(int times)
{
    int fd = eventfd(0, EFD_NONBLOCK);
    pthread_t threads[2];
    target = fd;
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(threads + i, NULL, teller, NULL) == 0);
    for (int i = 0; i < times; i++) {
        CHECK(assign(fd, 0) == 0);
        uint64_t before = told;
        while (told < before + 10)
            usleep(10);
        CHECK(comes());
        CHECK(assign(fd, KVM_IRQFD_FLAG_DEASSIGN) == 0);
        taken();
        count(fd);
        before = told;
        while (told < before + 10)
            usleep(10);
        CHECK(!taken() && count(fd) >= 8);
    }
    stop = 1;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    close(fd);
}

int main(void)
{
    make();
    at_once();
    numbers();
    children();
    races(200);
    levels();
    return 0;
}
