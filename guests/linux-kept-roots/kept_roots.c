// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * Address spaces that survive a switch of processes, for a Linux guest of anykvm without PCIDs: docs/paravirt.md,
 * "Address spaces that are kept".
 *
 * Without PCIDs Linux loads CR3 such that the whole address space is forgotten, though it counts the changes of each
 * (mm->context.tlb_gen) and would know whether anything has changed. This module does with the count what Linux does
 * where there are PCIDs: if the address space is the one that this processor loaded last from this page directory, and
 * its count is what it was, the load has bit 63 set. Otherwise it is as ever, and the count is noted.
 *
 * Why that is right: whoever changes tables raises the count, and then interrupts the processors that run on
 * the address space. A processor that does not run on it is not told, but finds another count when it loads it. The
 * count is read with interrupts off after the processor has entered itself in mm_cpumask, so a change is either seen here,
 * or its interrupt comes after the load. A page directory that is freed and used again has another ctx_id.
 *
 * Linux writes CR3 by an instruction that is patched into load_new_mm_cr3 when it boots: pv_ops has no part in it any more.
 * The function itself may be traced, so it is replaced by way of ftrace, if the load is to keep something.
 */
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/ftrace.h>
#include <linux/hash.h>
#include <linux/kprobes.h>
#include <linux/linkage.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/objtool.h>
#include <linux/percpu.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <asm/cpufeature.h>
#include <asm/msr.h>
#include <asm/processor.h>
#include <asm/special_insns.h>

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
#error "for Linux before 6.3: in later ones load_new_mm_cr3 is mostly no function of its own"
#endif

#define MSR_ROOTS	0x616b0001
#define KEEP		(1ull << 63)
#define VERSION		1
#define ENTRIES		128
#define IN_USE		1
/* Address spaces whose count is noted: sets by the page directory, of so many each. */
#define SETS		128
#define WAYS		4

/* The shared area: the rest of the page are entries, which this guest does not need to look at. */
struct area {
	u32 version, host_version, size, entries, status;
};

struct noted {
	u64 root, ctx_id, tlb_gen;
};

struct kept_roots {
	struct area *area;
	bool is_on;
	u64 kept, flushed;
	struct noted noted[SETS][WAYS];
};

/*
 * For the test of the test: changes of this one address space are not looked for. A process names its own by writing
 * anything to the parameter. With every address space careless, the shell that runs the test would be lost as well.
 */
static u64 careless;

static int set_careless(const char *value, const struct kernel_param *unused)
{
	if (!current->mm)
		return -EINVAL;
	WRITE_ONCE(careless, current->mm->context.ctx_id);
	return 0;
}

static const struct kernel_param_ops careless_ops = { .set = set_careless };
module_param_cb(careless, &careless_ops, NULL, 0200);

static DEFINE_PER_CPU(struct kept_roots *, own);
static unsigned long function;
static int hotplug;

/* Loads CR3 and returns true, or has load_new_mm_cr3 do it. */
__visible notrace __attribute__((used)) bool kept_roots_load(pgd_t *pgd)
{
	struct kept_roots *this = this_cpu_read(own);
	u64 root = __pa(pgd), gen, id;
	struct mm_struct *mm;
	struct noted *set;
	pgd_t *of;
	int n;

	if (!this || !this->is_on)
		return false;
	/* The kernel's own directories are no process's. */
	mm = READ_ONCE(virt_to_page(pgd)->pt_mm);
	if (!mm || get_kernel_nofault(of, &mm->pgd) || of != pgd)
		return false;
	set = this->noted[hash_64(root, ilog2(SETS))];
	id = mm->context.ctx_id;
	gen = atomic64_read(&mm->context.tlb_gen);
	for (n = 0; n < WAYS && set[n].root != root; n++)
		;
	if (n < WAYS && set[n].ctx_id == id && (set[n].tlb_gen == gen || id == READ_ONCE(careless))) {
		this->kept++;
		native_write_cr3(root | KEEP);
		return true;
	}
	/* Any other may go: it is noted again by its next load. */
	if (n == WAYS)
		n = this->flushed % WAYS;
	this->flushed++;
	set[n] = (struct noted){ root, id, gen };
	return false;
}

/*
 * Called at the start of load_new_mm_cr3(pgd, asid, need_flush): returns to it, or to who has called it.
 */
extern void kept_roots_entry(void);
asm(".pushsection .text\n"
    ".globl kept_roots_entry\n"
    ".type kept_roots_entry, @function\n"
    "kept_roots_entry:\n"
    "	push %rdi\n"
    "	push %rsi\n"
    "	push %rdx\n"
    "	call kept_roots_load\n"
    "	pop %rdx\n"
    "	pop %rsi\n"
    "	pop %rdi\n"
    "	test %al, %al\n"
    "	jz 1f\n"
    "	add $8, %rsp\n"
    "1:" ASM_RET
    ".size kept_roots_entry, . - kept_roots_entry\n"
    ".popsection\n");
STACK_FRAME_NON_STANDARD(kept_roots_entry);

/* CPUID: where anykvm's leaves are, and whether they have this. */
static bool is_there(void)
{
	u32 base, a, b, c, d;

	if (!boot_cpu_has(X86_FEATURE_HYPERVISOR))
		return false;
	for (base = 0x40000000; base < 0x40010000; base += 0x100) {
		cpuid(base, &a, &b, &c, &d);
		/* "anyk", "vman", "ykvm" */
		if (b == 0x6b796e61 && c == 0x6e616d76 && d == 0x6d766b79) {
			cpuid(a, &a, &b, &c, &d);
			return (a & 2) && b >= VERSION;
		}
	}
	return false;
}

static int online(unsigned int cpu)
{
	struct kept_roots *this = per_cpu(own, cpu);
	struct area *area = this->area;
	int error;

	memset(area, 0, PAGE_SIZE);
	area->version = VERSION;
	area->size = 64 + 16 * ENTRIES;
	area->entries = ENTRIES;
	error = wrmsrl_safe(MSR_ROOTS, __pa(area) | IN_USE);
	if (error || area->status || !area->entries)
		return -EIO;
	memset(this->noted, 0, sizeof(this->noted));
	WRITE_ONCE(this->is_on, true);
	return 0;
}

static int offline(unsigned int cpu)
{
	struct kept_roots *this = per_cpu(own, cpu);
	unsigned long flags;

	/* From here on loads flush. */
	local_irq_save(flags);
	WRITE_ONCE(this->is_on, false);
	wrmsrl_safe(MSR_ROOTS, 0);
	local_irq_restore(flags);
	return 0;
}

static void release(void)
{
	int cpu;

	for_each_possible_cpu(cpu) {
		struct kept_roots *this = per_cpu(own, cpu);

		if (this)
			free_page((unsigned long)this->area);
		kfree(this);
		per_cpu(own, cpu) = NULL;
	}
}

static int find(void)
{
	struct kprobe probe = { .symbol_name = "load_new_mm_cr3" };
	int error = register_kprobe(&probe);

	if (error)
		return error;
	function = (unsigned long)probe.addr;
	unregister_kprobe(&probe);
	return 0;
}

static int __init kept_roots_init(void)
{
	int error, cpu;

	/* With PCIDs Linux does it by itself; page-table isolation loads another root at each system call. */
	if (!is_there() || (__read_cr4() & X86_CR4_PCIDE) || boot_cpu_has(X86_FEATURE_PTI))
		return -ENODEV;
	for_each_possible_cpu(cpu) {
		struct kept_roots *this = kzalloc(sizeof(*this), GFP_KERNEL);

		per_cpu(own, cpu) = this;
		if (this)
			this->area = (struct area *)get_zeroed_page(GFP_KERNEL);
		if (!this || !this->area) {
			error = -ENOMEM;
			goto no_memory;
		}
	}
	error = find();
	if (error)
		goto no_memory;
	error = register_ftrace_direct(function, (unsigned long)kept_roots_entry);
	if (error)
		goto no_memory;
	hotplug = cpuhp_setup_state(CPUHP_AP_ONLINE_DYN, "anykvm/kept_roots:online", online, offline);
	if (hotplug < 0) {
		error = hotplug;
		unregister_ftrace_direct(function, (unsigned long)kept_roots_entry);
		goto no_memory;
	}
	return 0;
no_memory:
	release();
	return error;
}

static void __exit kept_roots_exit(void)
{
	u64 kept = 0, flushed = 0;
	int cpu;

	cpuhp_remove_state(hotplug);
	unregister_ftrace_direct(function, (unsigned long)kept_roots_entry);
	for_each_possible_cpu(cpu) {
		kept += per_cpu(own, cpu)->kept;
		flushed += per_cpu(own, cpu)->flushed;
	}
	pr_info("kept_roots: %llu loads kept their address space, %llu did not\n", kept, flushed);
	release();
}

module_init(kept_roots_init);
module_exit(kept_roots_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("Address spaces that survive a switch of processes on anykvm");
