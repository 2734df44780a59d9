/*
 * A VMM that has stopped a vCPU reads its dirty ring once: whatever ended KVM_RUN, each page that the
 * guest has written since is in the ring then, however fast its loop writes pages. Ends with 0 if so.
 */
#include "check.h"

enum { PAGE = 4096, ENTRIES = 1024, PAGES = 8192, TABLES = 0x10000, LIST = 0x100000, FIRST = LIST / PAGE + 32 };

/* Writes RCX to all pages of the list at RBX, two at a time, R9 times, tells, and again once with the next number. */
static const uint8_t CODE[] = {
    0x48, 0x89, 0xde,                   /* 1: mov rsi, rbx */
    0x44, 0x89, 0xc7,                   /* mov edi, r8d */
    0x48, 0x8b, 0x06,                   /* 2: mov rax, [rsi] */
    0x48, 0x8b, 0x56, 0x08,             /* mov rdx, [rsi + 8] */
    0x48, 0x89, 0x08,                   /* mov [rax], rcx */
    0x48, 0x89, 0x0a,                   /* mov [rdx], rcx */
    0x48, 0x83, 0xc6, 0x10,             /* add rsi, 16 */
    0xff, 0xcf,                         /* dec edi */
    0x75, 0xeb,                         /* jne 2b */
    0x41, 0xff, 0xc9,                   /* dec r9d */
    0x75, 0xe0,                         /* jne 1b */
    0xe6, 0x10,                         /* out 0x10, al */
    0x48, 0xff, 0xc1,                   /* inc rcx */
    0x41, 0xb9, 0x01, 0x00, 0x00, 0x00, /* mov r9d, 1 */
    0xeb, 0xd3,                         /* jmp 1b */
};

static uint8_t *memory;

static uint64_t *page(uint64_t n) { return (uint64_t *)(memory + n * PAGE); }

static void start_in_long_mode(int vcpu, struct kvm_regs regs)
{
    struct kvm_sregs sregs;
    uint64_t *tables = (uint64_t *)(memory + TABLES);
    /* The first GiB, by pages of 2 MiB. */
    tables[0] = TABLES + 0x1000 + 3;
    tables[0x200] = TABLES + 0x2000 + 3;
    for (uint64_t n = 0; n < 512; n++)
        tables[0x400 + n] = n << 21 | 0x83;
    CHECK(ioctl(vcpu, KVM_GET_SREGS, &sregs) == 0);
    sregs.cr0 |= 0x80000001;
    sregs.cr3 = TABLES;
    sregs.cr4 |= 0x20;
    sregs.efer |= 0x500;
    sregs.cs = (struct kvm_segment){ .selector = 8, .limit = ~0u, .type = 11, .present = 1, .s = 1, .l = 1, .g = 1 };
    sregs.ss = (struct kvm_segment){ .selector = 16, .limit = ~0u, .type = 3, .present = 1, .s = 1, .db = 1, .g = 1 };
    sregs.ds = sregs.es = sregs.ss;
    CHECK(ioctl(vcpu, KVM_SET_SREGS, &sregs) == 0);
    CHECK(ioctl(vcpu, KVM_SET_REGS, &regs) == 0);
}

int main(void)
{
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vm = ioctl(kvm, KVM_CREATE_VM, 0);
    CHECK(kvm >= 0 && vm >= 0);
    struct kvm_enable_cap cap = { .cap = KVM_CAP_DIRTY_LOG_RING, .args = { ENTRIES * sizeof(struct kvm_dirty_gfn) } };
    CHECK(ioctl(vm, KVM_ENABLE_CAP, &cap) == 0);
    uint64_t size = (FIRST + PAGES) * (uint64_t)PAGE;
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memcpy(memory + 0x1000, CODE, sizeof CODE);
    struct kvm_userspace_memory_region region = {
        .flags = KVM_MEM_LOG_DIRTY_PAGES, .memory_size = size, .userspace_addr = (uintptr_t)memory,
    };
    CHECK(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
    int vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    CHECK(vcpu >= 0);
    struct kvm_run *run = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    CHECK(run != MAP_FAILED);
    volatile struct kvm_dirty_gfn *ring = mmap(NULL, ENTRIES * sizeof *ring, PROT_READ | PROT_WRITE,
                                               MAP_SHARED, vcpu, KVM_DIRTY_LOG_PAGE_OFFSET * PAGE);
    CHECK(ring != MAP_FAILED);
    /* First so often one page that the loop is known to be executed much. */
    uint64_t *list = (uint64_t *)(memory + LIST);
    for (uint64_t n = 0; n < PAGES; n++)
        list[n] = FIRST * PAGE;
    start_in_long_mode(vcpu, (struct kvm_regs){ .rip = 0x1000, .rflags = 2, .rbx = LIST, .rcx = 1, .r8 = PAGES / 2, .r9 = 3000 });

    static uint64_t known[PAGES];
    unsigned next = 0, fulls = 0;
    for (int pass = 1; pass <= 200;) {
        CHECK(ioctl(vcpu, KVM_RUN, 0) == 0);
        if (run->exit_reason == KVM_EXIT_IO)
            pass++;
        else
            CHECK(run->exit_reason == KVM_EXIT_DIRTY_RING_FULL && ++fulls);
        unsigned taken = 0;
        while (ring[next % ENTRIES].flags == KVM_DIRTY_GFN_F_DIRTY) {
            volatile struct kvm_dirty_gfn *entry = ring + next++ % ENTRIES;
            if (entry->offset >= FIRST)
                known[entry->offset - FIRST] = *page(entry->offset);
            entry->flags = KVM_DIRTY_GFN_F_RESET;
            taken++;
        }
        for (unsigned n = 0; n < PAGES; n++)
            CHECK(*page(FIRST + n) == known[n]);
        CHECK(ioctl(vm, KVM_RESET_DIRTY_RINGS, 0) == (int)taken);
        /* Powers of 3 are all numbers below the prime 65537, once each. */
        for (uint64_t n = 3, at = 1; pass == 2 && at < PAGES; n = n * 3 % 65537)
            if (n < PAGES)
                list[at++] = (FIRST + n) * PAGE;
    }
    CHECK(fulls > 200);
    return 0;
}
