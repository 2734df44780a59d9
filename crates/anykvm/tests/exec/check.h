/* What the programs of these tests begin with. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

/* Ends the program, and tells why, unless it is true. */
#define CHECK(what)                                                                   \
    do {                                                                              \
        if (!(what)) {                                                                \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

/* Has a vCPU begin in real mode at 0:0x1000, with its stack below 0x8000. */
static inline void start_at_0x1000(int vcpu)
{
    struct kvm_sregs sregs;
    CHECK(ioctl(vcpu, KVM_GET_SREGS, &sregs) == 0);
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    CHECK(ioctl(vcpu, KVM_SET_SREGS, &sregs) == 0);
    struct kvm_regs regs = { .rip = 0x1000, .rflags = 2, .rsp = 0x8000 };
    CHECK(ioctl(vcpu, KVM_SET_REGS, &regs) == 0);
}
