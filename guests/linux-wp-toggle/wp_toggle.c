// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * Clears CR0.WP and sets it again at each switch of tasks, and writes to read-only memory in between, as PaX's KERNEXEC
 * does: that kernel keeps what it rarely changes read-only, and opens it by CR0.WP for the few writes.
 *
 * Parameters, also while it is loaded: `toggle` (0: the module is called at each switch, and does nothing), and, to be
 * read, `written`: how often it has written.
 */
#include <linux/irqflags.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/string.h>
#include <linux/tracepoint.h>
#include <asm/processor-flags.h>
#include <asm/special_insns.h>

static bool toggle = true;
module_param(toggle, bool, 0644);

/* Read-only once the module is loaded: a write with CR0.WP set is a page fault. */
static unsigned long written __ro_after_init;
module_param(written, ulong, 0444);

static struct tracepoint *switches;

/* The kernel's own write_cr0 does not let WP be cleared. */
static __always_inline void load_cr0(unsigned long value)
{
	asm volatile("mov %0, %%cr0" : : "r" (value) : "memory");
}

static void on_switch(void *data, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int state)
{
	unsigned long flags, cr0;

	if (!READ_ONCE(toggle))
		return;
	local_irq_save(flags);
	cr0 = read_cr0();
	load_cr0(cr0 & ~X86_CR0_WP);
	atomic_long_inc((atomic_long_t *)&written);
	load_cr0(cr0);
	local_irq_restore(flags);
}

static void find(struct tracepoint *tp, void *unused)
{
	if (!strcmp(tp->name, "sched_switch"))
		switches = tp;
}

static int __init begin(void)
{
	for_each_kernel_tracepoint(find, NULL);
	return switches ? tracepoint_probe_register(switches, on_switch, NULL) : -ENOENT;
}

static void __exit end(void)
{
	tracepoint_probe_unregister(switches, on_switch, NULL);
	tracepoint_synchronize_unregister();
}

module_init(begin);
module_exit(end);
MODULE_DESCRIPTION("CR0.WP is toggled at each switch of tasks");
MODULE_LICENSE("Dual MIT/GPL");
