/* Programs of 16 and 32 bits in segments of a local descriptor table, as DOS emulators and Wine make them: what they compute, which
 * signals they get and where, each step of theirs, and what a debugger's breakpoints find. Prints only what is the same on each machine. */
#define _GNU_SOURCE
#include <asm/ldt.h>
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

/* One segment's worth: code, DS at 0x4000, ES at 0x8000, and the stack below 0xf000. */
static unsigned char area[0x10000] __attribute__((aligned(0x10000)));

/* Selectors of the table. */
#define SEL(n) ((n) * 8 + 7)
#define C16 7       /* code of 16 bits at the area */
#define D16 15      /* data at 0x4000, 16 KiB */
#define E16 23      /* data at 0x8000, 4 KiB */
#define S16 31      /* the area as a stack of 16 bits */
#define C32 39      /* code of 32 bits at the area */
#define RO 47       /* data that is not written */
#define DOWN 55     /* expands down: from 0x1000 to 0xffff, at 0x8000 */
#define NP 63       /* not present */
#define XO 71       /* code that is not read */
#define C16C 79     /* the same as C16 */
#define FLAT 87     /* all of memory */
#define C16B 95     /* code of 16 bits, 0x80 further on */
#define SHORT 103   /* code of 16 bits that ends at 0x10f */
#define GONE 111    /* no descriptor */
#define BIG 119     /* data at 0x4000 of 16 bits' addresses and a stack's B flag */

static void describe(int selector, unsigned base, unsigned limit, int bits32, int contents, int no_write, int pages, int absent) {
    struct user_desc d;
    memset(&d, 0, sizeof d);
    d.entry_number = selector >> 3;
    d.base_addr = base;
    d.limit = limit;
    d.seg_32bit = bits32;
    d.contents = contents;
    d.read_exec_only = no_write;
    d.limit_in_pages = pages;
    d.seg_not_present = absent;
    d.useable = 1;
    int done = syscall(SYS_modify_ldt, 0x11, &d, sizeof d);
    if (done != 0) {
        printf("modify_ldt: %s\n", strerror(-done));
        exit(1);
    }
}

static void describe_all(void) {
    unsigned at = (unsigned)(uintptr_t)area;
    describe(C16, at, 0x3fff, 0, 2, 0, 0, 0);
    describe(D16, at + 0x4000, 0x3fff, 0, 0, 0, 0, 0);
    describe(E16, at + 0x8000, 0x0fff, 0, 0, 0, 0, 0);
    describe(S16, at, 0xffff, 0, 0, 0, 0, 0);
    describe(C32, at, 0x3fff, 1, 2, 0, 0, 0);
    describe(RO, at + 0x4000, 0x3fff, 0, 0, 1, 0, 0);
    describe(DOWN, at + 0x8000, 0x0fff, 0, 1, 0, 0, 0);
    describe(NP, at + 0x4000, 0x3fff, 0, 0, 0, 0, 1);
    describe(XO, at, 0x3fff, 0, 2, 1, 0, 0);
    describe(C16C, at, 0x3fff, 0, 2, 0, 0, 0);
    describe(FLAT, 0, 0xfffff, 1, 0, 0, 1, 0);
    describe(C16B, at + 0x80, 0x3fff, 0, 2, 0, 0, 0);
    describe(SHORT, at, 0x010f, 0, 2, 0, 0, 0);
    describe(BIG, at + 0x4000, 0x3fff, 1, 0, 0, 0, 0);
}

/* Registers before and after. */
struct state { uint32_t ax, bx, cx, dx, si, di, bp, flags, ds, es, gs, ss, sp; };
struct state in, out;
struct { uint32_t offset; uint16_t selector; } __attribute__((packed)) target;
uint64_t saved;
void enter(void);
void recover(void);
asm(".text\n"
    ".globl enter, recover\n"
    "enter: push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15\n"
    "mov %rsp, saved\n"
    "mov in+32, %ds; mov in+36, %es; mov in+40, %gs\n"
    "mov in+28, %eax; mov in+44, %ecx\n"
    "mov %ecx, %ss\n"
    "mov $area+0xf000, %esp\n"
    "push %rax; popf\n"
    "mov in, %eax; mov in+4, %ebx; mov in+8, %ecx; mov in+12, %edx\n"
    "mov in+16, %esi; mov in+20, %edi; mov in+24, %ebp\n"
    "lcall *target\n"
    "mov %eax, out; mov %ebx, out+4; mov %ecx, out+8; mov %edx, out+12\n"
    "mov %esi, out+16; mov %edi, out+20; mov %ebp, out+24; mov %esp, out+48\n"
    "mov saved, %rsp\n"
    "pushf; pop %rax; mov %eax, out+28; cld\n"
    "mov %ds, out+32; mov %es, out+36; mov %gs, out+40; mov %ss, out+44\n"
    "recover: mov $0x2b, %eax; mov %eax, %ss\n"
    "xor %eax, %eax; mov %eax, %ds; mov %eax, %es; mov %eax, %gs\n"
    "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx\n"
    "ret\n");

/* What a signal said, if one came. */
struct fault { int signal, code, trap, error, at, selector, cr2; } fault;

static int in_area(uint64_t address) {
    uint64_t offset = address - (uint64_t)area;
    return offset < sizeof area ? (int)offset : -1;
}

static void on_signal(int signal, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (signal == SIGALRM)
        return;
    fault.signal = signal;
    fault.code = info->si_code;
    fault.trap = r[REG_TRAPNO];
    /* Of a breakpoint and of what is no memory access the kernel leaves an older one. */
    fault.error = r[REG_TRAPNO] == 1 || r[REG_TRAPNO] == 3 ? 0 : r[REG_ERR];
    fault.cr2 = r[REG_TRAPNO] == 14 ? in_area(r[REG_CR2]) : 0;
    fault.selector = r[REG_CSGSFS] & 0xffff;
    /* A fault's RIP is that of its segment. */
    fault.at = (int)r[REG_RIP];
    out.ax = r[REG_RAX]; out.bx = r[REG_RBX]; out.cx = r[REG_RCX]; out.dx = r[REG_RDX];
    out.si = r[REG_RSI]; out.di = r[REG_RDI]; out.bp = r[REG_RBP]; out.sp = r[REG_RSP];
    out.flags = r[REG_EFL];
    out.ss = (uint64_t)r[REG_CSGSFS] >> 48;
    r[REG_RIP] = (greg_t)recover;
    r[REG_RSP] = saved;
    r[REG_EFL] = 0x202;
    r[REG_CSGSFS] = 0x33 | (greg_t)0x2b << 48;
}

/* A piece of code, copied to 0x100, and how it is entered. */
struct snippet { const char *name; const unsigned char *begin, *end; int selector; uint32_t mask; uint32_t cx; };

#define ARITH 0x8d5
#define ALL 0xcd5
#define NONE 0x400
#define CODE(name, bits, text)                                                                                                       \
    extern const unsigned char name##_begin[], name##_end[];                                                                         \
    asm(".pushsection .text\n.code" #bits "\n" #name "_begin:\n" text "\n" #name "_end:\n.code64\n.popsection\n")
#define S(name, selector, mask, cx) { #name, name##_begin, name##_end, selector, mask, cx }
#define RET16 "lretl\n"
#define RET32 "lret\n"

CODE(sums, 16, "1: movw (%bx,%si), %ax; addw %ax, %dx; adcw $3, 2(%bx,%di); addw $2, %si; rolw $3, %dx; decw %cx; jnz 1b; testw %dx, %dx;" RET16);
CODE(strings, 16, "cld; movw $0, %si; movw $0x200, %di; movw $300, %cx; rep movsb; movw $0x5a5a, %ax; movw $77, %cx; rep stosw;"
     "std; movw $0x1ff, %si; movw $0x7ff, %di; movw $99, %cx; rep movsb; cld; movw $0, %di; movw $0x1000, %cx; movb $7, %al; repne scasb;"
     "movw $0x100, %si; movw $0x300, %di; movw $40, %cx; repe cmpsw; lodsw; movw %cx, %dx;" RET16);
CODE(strings32, 16, "cld; movl $0, %esi; movl $0x100, %edi; movl $60, %ecx; addr32 rep movsl; movl $0x20, %ecx; movw $9, %ax;"
     "addr32 rep stosw; movl $0x800, %edi; movl $0x10, %ecx; movl $0, %esi; addr32 repe cmpsb; movl %ecx, %edx;" RET16);
CODE(stack, 16, "pushaw; pushfw; popw %ax; popaw; pushal; popal; enterw $32, $0; movw $0x1234, -4(%bp); movw -4(%bp), %ax; leavew;"
     "enterw $8, $3; leavew; pushw $-2; pushl $-3; popl %ecx; popw %dx; pushw %sp; popw %bx; pushw %ds; popw %di; call 1f; jmp 2f;"
     "1: incw %ax; ret $0; 2: cmpw $3, %ax;" RET16);
CODE(calls, 16, "movw $5, %cx; 1: pushw %cx; lcallw $95, $2f - calls_begin + 0x80; popw %cx; loop 1b; jmp 4f;"
     "2: addw $7, %ax; pushw %cs; popw %bx; lcallw $79, $3f - calls_begin + 0x100; lretw;"
     "3: addw %cx, %dx; movw %cs, %si; lretw; 4: lcalll $39, $5f - calls_begin + 0x100; ljmpw $95, $6f - calls_begin + 0x80;"
     ".code32; 5: addl $0x10001, %eax; movl %cs, %ebp; lret; .code16; 6: cmpw %ax, %dx;" RET16);
CODE(memory_calls, 16, "movw $3f - memory_calls_begin + 0x80, 0x20; movw $95, 0x22; movw $9, %cx; 1: lcallw *0x20; loop 1b;"
     "movl $4f - memory_calls_begin + 0x100, 0x24; movw $39, 0x28; lcalll *0x24; pushw $1; pushw $2; call 5f; jmp 6f;"
     "3: incw %ax; lretw; .code32; 4: addl $5, %eax; lret; .code16; 5: movw %sp, %si; ss movw 2(%si), %dx; ret $4; 6: cmpw $2, %dx;" RET16);
CODE(loads, 16, "movw $0x10, 0; movw $15, 2; movw $0x11, 4; movw $23, 6; les 0, %bx; lds 4, %si; movw $0x12, %es:8; movw $87, %es:10;"
     "lgs %es:8, %di; movw %gs, %ax; movw %ds, %cx; movw %es, %dx; pushw $15; popw %ds; pushl $23; popl %es; testw %ax, %ax;" RET16);
CODE(looks, 16, "xorw %bp, %bp; movw $0, %si; 1: movw %si, %ax; orw $7, %ax; movl $-1, %ecx; lar %eax, %ecx; movl %ecx, %es:(%si); jz 2f; orw $1, %bp;"
     "2: movl $-1, %ecx; lsll %eax, %ecx; movl %ecx, %es:4(%si); verr %ax; lahf; movb %ah, %es:0x200(%si); movw %si, %ax; orw $7, %ax; verw %ax; lahf;"
     "movb %ah, %es:0x201(%si); addw $8, %si; cmpw $128, %si; jb 1b; movw $0x2b, %ax; larw %ax, %bx; movw $0x33, %ax; lslw %ax, %dx; cmpw %ax, %ax;" RET16);
CODE(loops, 16, "movw $300, %cx; 1: addw $3, %ax; loop 1b; movw $40, %cx; 2: incw %dx; cmpw $60, %dx; loopne 2b; movl $0x10005, %ecx;"
     "3: incw %bp; addr32 loop 4f; 4: jcxz 5f; jmp 3b; 5: jecxz 6f; incw %bp; decl %ecx; 6: movw $4, %bx; movb $3, %al; xlatb; cmpw %ax, %ax;" RET16);
CODE(decimal, 16, "movw $0x99, %ax; addb $0x27, %al; daa; movb %al, %bl; subb $0x19, %al; das; movb %al, %bh; movw $0x0f, %ax; addb $9, %al; aaa; movw %ax, %cx;"
     "subb $5, %al; aas; movw %ax, %dx; movb $77, %al; aam; movw %ax, %si; aad; movw %ax, %di; .byte 0xd6; cmpw %ax, %ax;" RET16);
CODE(wide, 16, "movl $0x12345678, %eax; imull $77, %eax, %ebx; movzwl %ax, %ecx; bswap %eax; shldl $7, %eax, %edx; leal (%eax,%ebx,4), %esi; leaw 5(%bx,%si), %di;"
     "andl $0xffc, %ecx; addr32 movl (,%ecx,1), %ebp; arplw %ax, %bx; boundw %cx, 0x3000; cmpl %eax, %ebx;" RET16);
CODE(flat32, 32, "movl $1000, %ecx; 1: movl 0x40(%ebx), %eax; addl %eax, %edx; adcl $1, (%ebx,%ecx,4); pushl %edx; popl %esi; call 2f; decl %ecx; jnz 1b; jmp 3f;"
     "2: xorl %esi, %eax; ret; 3: pushal; popal; pushl %ds; popl %ds; rep stosw; cmpl %eax, %edx;" RET32);
CODE(spins, 16, "1: movl $6000000, %ecx; 2: addl $3, %eax; pushw %ax; popw %dx; decl %ecx; jnz 2b; decw %bx; jnz 1b; cmpw %ax, %ax;" RET16);
/* Each of these ends with a signal. */
CODE(data_end, 16, "movw $0x3ffe, %si; movw (%si), %ax; incw %si; movw (%si), %ax;" RET16);
CODE(data_end_far, 16, "movl $0x14000, %esi; addr32 movb (%esi), %al;" RET16);
CODE(string_end, 16, "cld; movw $0, %si; movw $0xf00, %di; movw $0x200, %cx; rep movsw;" RET16);
CODE(fill_end, 16, "std; movw $0x21, %di; movw $0x50, %cx; movw $0x7788, %ax; rep stosw;" RET16);
CODE(stack_end, 16, "movw $87, %ax; movw $0xffff, %bp; movw (%bp), %ax;" RET16);
CODE(read_only, 16, "movw $47, %ax; movw %ax, %ds; movw 0x10, %bx; movw %bx, 0x10;" RET16);
CODE(code_write, 16, "cs movw 0x100, %ax; cs movw %ax, 0x100;" RET16);
CODE(code_read, 16, "ljmpw $71, $1f - code_read_begin + 0x100; 1: movw $5, %bx; cs movw 0x100, %ax;" RET16);
CODE(down_below, 16, "movw $55, %ax; movw %ax, %es; movw %es:0x1000, %bx; movw %es:0xfffe, %bx; movw %es:0xfff, %bx;" RET16);
CODE(down_above, 16, "movw $55, %ax; movw %ax, %es; movl $0xffff, %ebx; movw %es:(%ebx), %dx;" RET16);
CODE(not_present, 16, "movw $63, %ax; movw %ax, %es;" RET16);
CODE(not_there, 16, "movw $111, %ax; movw %ax, %es;" RET16);
CODE(beyond, 16, "movw $0xfff7, %ax; movw %ax, %es;" RET16);
CODE(code_as_data, 16, "movw $7, %ax; movw %ax, %es; movb %es:0x100, %bl; movw $71, %ax; movw %ax, %es;" RET16);
CODE(ss_code, 16, "movw $7, %ax; movw %ax, %ss;" RET16);
CODE(ss_read_only, 16, "movw $47, %ax; movw %ax, %ss;" RET16);
CODE(ss_not_present, 16, "movw $63, %ax; movw %ax, %ss;" RET16);
CODE(ss_null, 16, "xorw %ax, %ax; movw %ax, %ss;" RET16);
CODE(ss_rpl, 16, "movw $28, %ax; movw %ax, %ss;" RET16);
CODE(null_use, 16, "xorw %ax, %ax; movw %ax, %es; movw $3, %ax; movw %ax, %ds; movw 0, %bx;" RET16);
CODE(cs_load, 16, "lcallw $15, $0x100;" RET16);
CODE(cs_null, 16, "lcallw $0, $0x100;" RET16);
CODE(cs_beyond, 16, "lcallw $103, $0x120;" RET16);
CODE(cs_end, 16, "ljmpw $103, $1f - cs_end_begin + 0x100; 1: movw $5, %ax; nop; nop; nop; nop; nop; nop;" RET16);
CODE(kernel_cs, 16, "lcallw $0x10, $0;" RET16);
CODE(retf_inner, 16, "pushw $4; pushw $0x100; lretw;" RET16);
CODE(divides, 16, "xorw %bx, %bx; movw $7, %ax; divw %bx;" RET16);
CODE(divides_aam, 16, "movw $7, %ax; aam $0;" RET16);
CODE(bound, 16, "movw $5, 0; movw $9, 2; movw $9, %ax; boundw %ax, 0; incw %ax; boundw %ax, 0;" RET16);
CODE(overflow, 16, "movw $0x7fff, %ax; into; incw %ax; into; incw %bx;" RET16);
CODE(int3, 16, "incw %ax; int3; incw %ax;" RET16);
CODE(int_3, 16, "incw %ax; .byte 0xcd, 3; incw %ax;" RET16);
CODE(int_1, 16, "incw %ax; .byte 0xcd, 1; incw %ax;" RET16);
CODE(int_21, 16, "movb $0x4c, %ah; .byte 0xcd, 0x21; incw %ax;" RET16);
CODE(ports, 16, "movw $0x3f8, %dx; inb %dx, %al;" RET16);
CODE(halts, 16, "hlt;" RET16);
CODE(clears, 16, "cli;" RET16);
CODE(flags, 16, "pushfw; popw %ax; orw $0x3200, %ax; pushw %ax; popfw; pushfw; popw %ax; andw $0x3200, %ax; pushfl; popl %ebx; andl $0x33200, %ebx; cmpw %ax, %ax;" RET16);
CODE(undefined, 16, "ud2;" RET16);
CODE(lock, 16, "lock incw 0; lock; movw %ax, 0;" RET16);
CODE(pages, 16, "movw $87, %ax; movw %ax, %es; movl $0x1000, %ebx; movw %es:(%ebx), %ax;" RET16);
CODE(trap, 16, "pushfw; popw %ax; orw $0x100, %ax; pushw %ax; popfw; nop; incw %ax;" RET16);
CODE(trap32, 32, "pushfl; orl $0x100, (%esp); popfl; nop; incl %eax;" RET32);
CODE(int332, 32, "incl %eax; int3; incl %eax;" RET32);
CODE(int132, 32, "incl %eax; int $1; incl %eax;" RET32);
CODE(end32, 32, "movl $0x3ffc, %esi; movl (%esi), %eax; incl %esi; movl (%esi), %eax;" RET32);
CODE(strings_end32, 32, "cld; movl $0x3ff0, %esi; movl $0, %edi; movl $9, %ecx; rep movsl;" RET32);

static const struct snippet snippets[] = {
    S(sums, C16, ARITH & ~0x10, 300), S(strings, C16, ALL, 0), S(strings32, C16, ALL, 0), S(stack, C16, ALL, 0), S(calls, C16, ALL, 0),
    S(memory_calls, C16, ALL, 0), S(loads, C16, ARITH & ~0x10, 0), S(looks, C16, ALL, 0), S(loops, C16, ALL, 0), S(decimal, C16, ALL, 0),
    S(wide, C16, ALL, 0), S(flat32, C32, ALL, 0), S(data_end, C16, NONE, 0), S(data_end_far, C16, NONE, 0),
    S(string_end, C16, NONE, 0), S(fill_end, C16, NONE, 0), S(stack_end, C16, NONE, 0), S(read_only, C16, NONE, 0), S(code_write, C16, NONE, 0),
    S(code_read, C16, NONE, 0), S(down_below, C16, NONE, 0), S(down_above, C16, NONE, 0), S(not_present, C16, NONE, 0), S(not_there, C16, NONE, 0),
    S(beyond, C16, NONE, 0), S(code_as_data, C16, NONE, 0), S(ss_code, C16, NONE, 0), S(ss_read_only, C16, NONE, 0), S(ss_not_present, C16, NONE, 0),
    S(ss_null, C16, NONE, 0), S(ss_rpl, C16, NONE, 0), S(null_use, C16, NONE, 0), S(cs_load, C16, NONE, 0), S(cs_null, C16, NONE, 0),
    S(cs_beyond, C16, NONE, 0), S(cs_end, C16, NONE, 0), S(kernel_cs, C16, NONE, 0), S(retf_inner, C16, NONE, 0), S(divides, C16, NONE, 0),
    S(divides_aam, C16, NONE, 0), S(bound, C16, NONE, 0), S(overflow, C16, ARITH, 0), S(int3, C16, ARITH, 0), S(int_3, C16, ARITH, 0),
    S(int_1, C16, ARITH, 0), S(int_21, C16, NONE, 0), S(ports, C16, NONE, 0), S(halts, C16, NONE, 0), S(clears, C16, NONE, 0),
    S(flags, C16, ALL, 0), S(undefined, C16, NONE, 0), S(lock, C16, NONE, 0), S(pages, C16, NONE, 0), S(trap, C16, NONE, 0), S(trap32, C32, NONE, 0),
    S(int332, C32, ARITH, 0), S(int132, C32, ARITH, 0), S(end32, C32, NONE, 0), S(strings_end32, C32, NONE, 0),
};
static const struct snippet spinner = S(spins, C16, ALL, 0);

static void prepare(const struct snippet *s) {
    memset(area, 0x90, 0x4000);
    memcpy(area + 0x100, s->begin, s->end - s->begin);
    for (int i = 0x4000; i < 0x10000; i++)
        area[i] = i < 0xc000 ? (unsigned char)(i * 7 + (i >> 8)) : 0;
    /* The pair that BOUND looks at. */
    memcpy(area + 0x7000, "\0\0\xff\x7f", 4);
    memset(&out, 0, sizeof out);
    memset(&fault, 0, sizeof fault);
    in = (struct state){ 0x11111111, 0x22220010, 0x33330000 | s->cx, 0x4444, 0x55550000, 0x66660200, 0x7777, 0x202, D16, E16, 0,
                         s->selector == C32 ? 0x2b : S16, 0 };
    if (s->selector == C32)
        in.bx = 0x10, in.cx = 0;
    target.offset = 0x100;
    target.selector = s->selector;
}

static uint32_t digest(uint32_t sum, const void *from, size_t len) {
    for (const unsigned char *p = from; len--; p++)
        sum = (sum ^ *p) * 16777619;
    return sum;
}

static void run(const struct snippet *s, struct state *result, struct fault *why, uint32_t *memory) {
    prepare(s);
    enter();
    /* Segments are the same in each run; the flags' others are not defined. */
    out.flags &= s->mask;
    out.sp -= (uint32_t)(uintptr_t)area;
    *result = out;
    *why = fault;
    *memory = digest(2166136261u, area + 0x4000, 0x8000);
}

static void print(const struct snippet *s, const struct state *r, const struct fault *f, uint32_t memory) {
    printf("%-14s %08x %08x %08x %08x %08x %08x %08x sp %05x fl %03x ds %02x es %02x gs %02x ss %02x mem %08x", s->name, r->ax, r->bx, r->cx, r->dx,
           r->si, r->di, r->bp, r->sp, r->flags, r->ds, r->es, r->gs, r->ss, memory);
    if (f->signal)
        printf(" signal %d code %d trap %d error %x at %02x:%x cr2 %x", f->signal, f->code, f->trap, f->error, f->selector, f->at, f->cr2);
    printf("\n");
}

static void compute(int times) {
    for (size_t n = 0; n < sizeof snippets / sizeof *snippets; n++) {
        const struct snippet *s = snippets + n;
        struct state first, r;
        struct fault why, f;
        uint32_t memory, m;
        run(s, &first, &why, &memory);
        print(s, &first, &why, memory);
        for (int i = 1; i < times; i++) {
            run(s, &r, &f, &m);
            if (memcmp(&r, &first, sizeof r) || memcmp(&f, &why, sizeof f) || m != memory) {
                printf("run %d differs: ", i);
                print(s, &r, &f, m);
                break;
            }
        }
    }
}

/* Signals from a timer, while code of 16 bits works on a stack of 16 bits. */
static void interrupted(void) {
    struct itimerval often = { { 0, 1000 }, { 0, 1000 } }, never = { { 0, 0 }, { 0, 0 } };
    prepare(&spinner);
    in.bx = 3;
    setitimer(ITIMER_REAL, &often, 0);
    enter();
    setitimer(ITIMER_REAL, &never, 0);
    out.flags &= spinner.mask;
    out.sp -= (uint32_t)(uintptr_t)area;
    print(&spinner, &out, &fault, digest(2166136261u, area + 0x4000, 0x8000));
}

/* A debugger's view. */
struct watch { const char *name; unsigned offset, control; int of_code; };

static void poke(pid_t child, int n, uint64_t value) {
    if (ptrace(PTRACE_POKEUSER, child, offsetof(struct user, u_debugreg) + n * 8, value) != 0)
        printf("register %d: %s\n", n, strerror(errno));
}

static pid_t start(const struct snippet *s, int times) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        prepare(s);
        raise(SIGSTOP);
        enter();
        while (--times > 0) {
            prepare(s);
            enter();
        }
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    return child;
}

/* Goes on until the next stop in the area, or the end; the signal that the child would get. */
static int next(pid_t child, int request, struct user_regs_struct *r) {
    int status, pass = 0;
    for (;;) {
        ptrace(request, child, 0, pass);
        waitpid(child, &status, 0);
        if (!WIFSTOPPED(status))
            return 0;
        ptrace(PTRACE_GETREGS, child, 0, r);
        if (r->cs != 0x33)
            return WSTOPSIG(status);
        pass = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
    }
}

static void watch(const struct snippet *s, const struct watch *w) {
    struct user_regs_struct r;
    pid_t child = start(s, 3);
    poke(child, 0, (uint64_t)area + w->offset);
    poke(child, 7, w->control << 16 | 1);
    printf("%s, %s:", s->name, w->name);
    uint32_t sum = 0;
    int signal, count = 0;
    while ((signal = next(child, PTRACE_CONT, &r)) != 0) {
        uint64_t status = ptrace(PTRACE_PEEKUSER, child, offsetof(struct user, u_debugreg[6]), 0);
        poke(child, 6, 0);
        uint32_t seen[] = { signal, r.rip, r.cs, r.rcx, r.rsi, r.rdi, status & 0x400f };
        sum = digest(sum, seen, sizeof seen);
        if (count++ < 4)
            printf(" %d at %llx:%llx cx %llx si %llx di %llx dr6 %llx;", signal, r.cs, r.rip, r.rcx & 0xffff, r.rsi & 0xffff, r.rdi & 0xffff,
                   (unsigned long long)status & 0x400f);
        if (count > 3000 || signal != SIGTRAP)
            break;
    }
    printf(" %d stops, %08x\n", count, sum);
    kill(child, SIGKILL);
    waitpid(child, 0, 0);
}

static void step(const struct snippet *s) {
    struct user_regs_struct r;
    pid_t child = start(s, 1);
    uint32_t sum = 0;
    int signal, count = 0;
    while ((signal = next(child, PTRACE_SINGLESTEP, &r)) == SIGTRAP && count < 6000) {
        uint32_t seen[] = { r.rip, r.cs, r.rax, r.rcx, r.rsi, r.rdi, r.rsp - (uint64_t)area, r.ds, r.es };
        sum = digest(sum, seen, sizeof seen);
        count++;
    }
    printf("%s: %d steps, then %d at %llx:%llx, %08x\n", s->name, count, signal, signal ? r.cs : 0, signal ? r.rip : 0, sum);
    kill(child, SIGKILL);
    waitpid(child, 0, 0);
}

static const struct watch watches[] = {
    { "executed", 0x100, 0x0, 1 },   { "executed later", 0x104, 0x0, 1 }, { "written, 2 bytes", 0x8200, 0x5, 0 },
    { "written, 4 bytes", 0x8210, 0xd, 0 }, { "touched, 1 byte", 0x4040, 0x3, 0 }, { "touched, 4 bytes", 0x4050, 0xf, 0 },
    { "the stack", 0xeff4, 0xd, 0 },
};

int main(void) {
    static unsigned char other[65536];
    stack_t stack = { other, 0, sizeof other };
    struct sigaction action;
    setvbuf(stdout, 0, _IOFBF, 1 << 16);
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaltstack(&stack, 0);
    int signals[] = { SIGSEGV, SIGBUS, SIGTRAP, SIGILL, SIGFPE, SIGALRM };
    for (size_t n = 0; n < sizeof signals / sizeof *signals; n++)
        sigaction(signals[n], &action, 0);
    if (mprotect(area, sizeof area, PROT_READ | PROT_WRITE | PROT_EXEC) != 0)
        return 1;
    describe_all();
    compute(200);
    interrupted();
    const struct snippet *some[] = { &snippets[1], &snippets[2], &snippets[3], &snippets[4], &snippets[11] };
    for (size_t n = 0; n < sizeof some / sizeof *some; n++)
        for (size_t w = 0; w < sizeof watches / sizeof *watches; w++)
            watch(some[n], watches + w);
    for (size_t n = 0; n < sizeof snippets / sizeof *snippets; n++)
        step(snippets + n);
    /* Descriptors that change and go while they are in use elsewhere. */
    describe(E16, (unsigned)(uintptr_t)area + 0x8100, 0x0fff, 0, 0, 0, 0, 0);
    describe(SHORT, (unsigned)(uintptr_t)area, 0x0107, 0, 2, 0, 0, 0);
    compute(3);
    return 0;
}
