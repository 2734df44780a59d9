/* A Multiboot kernel that flushes, and accesses 64 pages, and says on the debug port when each part begins. 32-bit paging. */

#define LOOPS 4000
#define PAGES 64
#define GVA 0x1000000u

asm(".section .text\n"
    ".balign 4\n"
    ".long 0x1badb002, 0, -0x1badb002\n"
    ".globl _start\n"
    "_start:\n"
    "  mov $stack + 8192, %esp\n"
    "  call measure\n"
    "1: hlt\n"
    "  jmp 1b\n");

char stack[8192];
unsigned directory[1024] __attribute__((aligned(4096)));
unsigned table[1024] __attribute__((aligned(4096)));
char data[PAGES][4096] __attribute__((aligned(4096)));

static inline void outb(unsigned short port, unsigned char v)
{
    asm volatile("outb %0, %1" : : "a"(v), "Nd"(port));
}

static void flush(int pages, unsigned stride)
{
    unsigned cr3, n;
    if (!pages) {
        asm volatile("mov %%cr3, %0; mov %0, %%cr3" : "=r"(cr3) : : "memory");
        return;
    }
    for (n = 0; n < PAGES; n++)
        asm volatile("invlpg (%0)" : : "r"(GVA + n * stride * 4096) : "memory");
}

static void access(unsigned stride, int write)
{
    unsigned n;
    for (n = 0; n < PAGES; n++) {
        volatile unsigned *p = (volatile unsigned *)(GVA + n * stride * 4096);
        if (write)
            *p = n;
        else
            (void)*p;
    }
}

/* The rows of refills.rs. */
static const struct { int pages, write; unsigned stride; } rows[] = {
    { 0, 0, 1 }, { 0, 1, 1 }, { 0, 0, 8 }, { 1, 0, 1 }, { 1, 0, 8 },
};

void measure(void)
{
    unsigned n, i, part = 0;
    /* The first 16 MiB by themselves, global as the kernel's code is, and behind them the pages. */
    for (n = 0; n < 4; n++)
        directory[n] = n << 22 | 0x183;
    directory[GVA >> 22] = (unsigned)table | 3;
    for (n = 0; n < 512; n++)
        table[n] = (unsigned)data[(n % PAGES + n / PAGES) % PAGES] | 3;
    asm volatile("mov %%cr4, %%eax; or $0x90, %%eax; mov %%eax, %%cr4\n"
                 "mov %0, %%cr3\n"
                 "mov %%cr0, %%eax; or $0x80000000, %%eax; mov %%eax, %%cr0"
                 : : "r"(directory) : "eax", "memory");
    for (n = 0; n < sizeof(rows) / sizeof(*rows); n++) {
        outb(0xe9, ++part);
        for (i = 0; i < LOOPS; i++)
            flush(rows[n].pages, rows[n].stride);
        outb(0xe9, ++part);
        for (i = 0; i < LOOPS; i++)
            access(rows[n].stride, rows[n].write);
        outb(0xe9, ++part);
        for (i = 0; i < LOOPS; i++) {
            flush(rows[n].pages, rows[n].stride);
            access(rows[n].stride, rows[n].write);
        }
    }
    outb(0xe9, ++part);
    outb(0xf4, 0);
}
