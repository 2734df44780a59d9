/*
 * KVM_CAP_DIRTY_LOG_RING, for `anykvm exec`: each page that the guest writes comes once for each time
 * that it was given back, a full ring ends KVM_RUN, and nothing is lost. Ends with 0 if so.
 */
#include "check.h"

enum { PAGE = 4096, ENTRIES = 256, RESERVED = 64, FIRST = 2, LAST = 0xef, SLOT = 3 };

/* Adds one to a byte of each page from FIRST to LAST, tells, and again. */
static const uint8_t CODE[] = {
    0xb8, 0x00, 0x02,             /* mov ax, 0x200 */
    0x8e, 0xc0,                   /* 1: mov es, ax */
    0x26, 0xfe, 0x06, 0x00, 0x00, /* inc byte es:[0] */
    0x05, 0x00, 0x01,             /* add ax, 0x100 */
    0x3d, 0x00, 0xf0,             /* cmp ax, 0xf000 */
    0x72, 0xf1,                   /* jb 1b */
    0xe6, 0x10, 0xeb, 0xea,       /* out 0x10, al; jmp to the start */
};

static int enable(int vm, uint32_t number, uint64_t bytes)
{
    struct kvm_enable_cap cap = { .cap = number, .args = { bytes } };
    return ioctl(vm, KVM_ENABLE_CAP, &cap);
}

int main(void)
{
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vm = ioctl(kvm, KVM_CREATE_VM, 0);
    CHECK(kvm >= 0 && vm >= 0);
    CHECK(ioctl(vm, KVM_CHECK_EXTENSION, KVM_CAP_DIRTY_LOG_RING) == 65536 * 16);
    CHECK(ioctl(vm, KVM_RESET_DIRTY_RINGS, 0) == -1 && errno == EINVAL);
    CHECK(enable(vm, KVM_CAP_DIRTY_LOG_RING, PAGE / 2) == -1 && errno == EINVAL);
    CHECK(enable(vm, KVM_CAP_DIRTY_LOG_RING, 3 * PAGE) == -1 && errno == EINVAL);
    CHECK(enable(vm, KVM_CAP_DIRTY_LOG_RING, 65536 * 32) == -1 && errno == E2BIG);
    CHECK(enable(vm, KVM_CAP_DIRTY_LOG_RING, ENTRIES * sizeof(struct kvm_dirty_gfn)) == 0);
    CHECK(enable(vm, KVM_CAP_DIRTY_LOG_RING, PAGE) == -1 && errno == EINVAL);
    uint8_t *memory = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memcpy(memory + 0x1000, CODE, sizeof CODE);
    struct kvm_userspace_memory_region region = {
        .slot = SLOT, .flags = KVM_MEM_LOG_DIRTY_PAGES,
        .memory_size = 1 << 20, .userspace_addr = (uintptr_t)memory,
    };
    CHECK(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
    struct kvm_dirty_log log = { .slot = SLOT, .dirty_bitmap = memory };
    CHECK(ioctl(vm, KVM_GET_DIRTY_LOG, &log) == -1 && errno == ENXIO);
    int vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    CHECK(vcpu >= 0);
    int size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    struct kvm_run *run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    CHECK(run != MAP_FAILED);
    volatile struct kvm_dirty_gfn *ring = mmap(NULL, ENTRIES * sizeof *ring, PROT_READ | PROT_WRITE,
                                               MAP_SHARED, vcpu, KVM_DIRTY_LOG_PAGE_OFFSET * PAGE);
    CHECK(ring != MAP_FAILED);
    off_t at = KVM_DIRTY_LOG_PAGE_OFFSET * PAGE;
    CHECK(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, vcpu, at) == MAP_FAILED && errno == EINVAL);
    CHECK(mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, vcpu, at) == MAP_FAILED && errno == EINVAL);
    /* All vCPUs show the same ring of coalesced writes. */
    int other = ioctl(vm, KVM_CREATE_VCPU, 1);
    CHECK(other >= 0);
    uint8_t *second = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, other, 0);
    CHECK((void *)second != MAP_FAILED);
    volatile uint32_t *one = (void *)((uint8_t *)run + KVM_COALESCED_MMIO_PAGE_OFFSET * PAGE);
    volatile uint32_t *two = (void *)(second + KVM_COALESCED_MMIO_PAGE_OFFSET * PAGE);
    *one = 0x1234;
    CHECK(*two == 0x1234);
    *one = 0;
    ((struct kvm_run *)second)->immediate_exit = 1;
    CHECK(run->immediate_exit == 0 && munmap(second, size) == 0);
    start_at_0x1000(vcpu);

    unsigned next = 0, seen[256];
    for (int pass = 1; pass <= 50; pass++) {
        memset(seen, 0, sizeof seen);
        int fulls = 0, over = 0;
        while (!over) {
            CHECK(ioctl(vcpu, KVM_RUN, 0) == 0);
            if (run->exit_reason == KVM_EXIT_DIRTY_RING_FULL) {
                fulls++;
                /* It stays full until something is given back. */
                CHECK(ioctl(vcpu, KVM_RUN, 0) == 0 && run->exit_reason == KVM_EXIT_DIRTY_RING_FULL);
            } else {
                CHECK(run->exit_reason == KVM_EXIT_IO);
                over = 1;
            }
            int count = 0;
            while (__atomic_load_n(&ring[next % ENTRIES].flags, __ATOMIC_ACQUIRE) == KVM_DIRTY_GFN_F_DIRTY) {
                volatile struct kvm_dirty_gfn *entry = ring + next % ENTRIES;
                CHECK(entry->slot == SLOT && entry->offset < 256);
                seen[entry->offset]++;
                __atomic_store_n(&entry->flags, KVM_DIRTY_GFN_F_RESET, __ATOMIC_RELEASE);
                next++;
                count++;
            }
            CHECK(over || count >= ENTRIES - RESERVED);
            CHECK(ioctl(vm, KVM_RESET_DIRTY_RINGS, 0) == count);
            CHECK(ioctl(vm, KVM_RESET_DIRTY_RINGS, 0) == 0);
        }
        CHECK(fulls >= 1);
        for (int page = FIRST; page <= LAST; page++)
            CHECK(seen[page] == 1 && memory[page * PAGE] == (uint8_t)pass);
        CHECK(seen[LAST + 1] == 0);
    }
    /* An entry that names what there is not does no harm. */
    CHECK(ioctl(vcpu, KVM_RUN, 0) == 0 && run->exit_reason == KVM_EXIT_DIRTY_RING_FULL);
    ring[next % ENTRIES].slot = 77;
    ring[(next + 1) % ENTRIES].offset = ~0ull;
    ring[next % ENTRIES].flags = ring[(next + 1) % ENTRIES].flags = KVM_DIRTY_GFN_F_RESET;
    CHECK(ioctl(vm, KVM_RESET_DIRTY_RINGS, 0) == 2);
    return 0;
}
