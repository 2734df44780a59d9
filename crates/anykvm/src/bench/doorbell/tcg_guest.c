/* A Multiboot kernel that rings doorbells and says on the debug port when each kind begins. */

#define RINGS 200000

asm(".section .text\n"
    ".balign 4\n"
    ".long 0x1badb002, 0, -0x1badb002\n"
    ".globl _start\n"
    "_start:\n"
    "  mov $stack + 8192, %esp\n"
    "  call ring_all\n"
    "1: hlt\n"
    "  jmp 1b\n");

char stack[8192];

static inline void outb(unsigned short port, unsigned char v)
{
    asm volatile("outb %0, %1" : : "a"(v), "Nd"(port));
}
static inline void outw(unsigned short port, unsigned short v)
{
    asm volatile("outw %0, %1" : : "a"(v), "Nd"(port));
}
static inline void outl(unsigned short port, unsigned v)
{
    asm volatile("outl %0, %1" : : "a"(v), "Nd"(port));
}
static inline unsigned inl(unsigned short port)
{
    unsigned v;
    asm volatile("inl %1, %0" : "=a"(v) : "Nd"(port));
    return v;
}

static unsigned config(unsigned device, unsigned at)
{
    outl(0xcf8, 0x80000000u | device << 11 | at);
    return inl(0xcfc);
}

static void say(unsigned char v)
{
    outb(0xe9, v);
}

void ring_all(void)
{
    unsigned device, i, base = 0;
    for (device = 0; device < 32; device++) {
        if (config(device, 0) != 0x10051af4)
            continue;
        base = config(device, 0x10) & ~3u;
        outl(0xcf8, 0x80000000u | device << 11 | 4);
        outl(0xcfc, 7);
    }
    say(1);
    for (i = 0; i < RINGS; i++)
        outl(0x5670, i);
    say(2);
    for (i = 0; i < RINGS; i++)
        *(volatile unsigned *)0xfd800000 = i;
    say(3);
    if (base) {
        /* ACKNOWLEDGE, DRIVER, DRIVER_OK: the ioeventfd is there from now on. */
        outb(base + 0x12, 1);
        outb(base + 0x12, 3);
        outb(base + 0x12, 7);
        for (i = 0; i < RINGS; i++)
            outw(base + 0x10, 0);
        say(4);
    }
    outb(0xf4, 0);
}
