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
