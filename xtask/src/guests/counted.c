/* A loop of two instructions, and the libraries' start around it: what N turns more cost is 2 * N
   instructions and N conditional branches, whatever the rest is. */
#include <stdlib.h>

int main(int argc, char **argv) {
    unsigned long n = argc > 1 ? strtoul(argv[1], 0, 10) : 1;
    __asm__ volatile("1: dec %0\n jne 1b" : "+r"(n) : : "cc");
    return 0;
}
