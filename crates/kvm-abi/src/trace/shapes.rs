//! The types of the arguments of KVM's calls.

use std::mem::{offset_of, size_of};

use kvm_bindings::*;

use crate::numbers::*;

/// A member of a structure.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) offset: usize,
    pub(super) size: usize,
    /// Members of the nested structure.
    pub(super) fields: &'static [Field],
}

/// The third argument of a call.
#[derive(Debug)]
pub(super) enum Shape {
    /// Not used.
    Nothing,
    /// An integer.
    Number,
    /// The address of a 64-bit word.
    Word,
    /// The address of a structure.
    Struct(&'static [Field]),
    /// The address of a 32-bit count; entries begin `at` bytes behind it.
    List {
        at: usize,
        size: usize,
        entry: &'static [Field],
        /// The VMM only passes how many entries fit.
        only_count: bool,
    },
}

/// Returns the size of the member that a projection selects.
const fn size_of_member<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! fields {
    ($type:ty: $($name:ident $(($inner:expr))?),* $(,)?) => {
        &[$(Field {
            name: stringify!($name),
            offset: offset_of!($type, $name),
            size: size_of_member(|value: &$type| &value.$name),
            fields: fields!(@inner $($inner)?),
        }),*]
    };
    (@inner) => { &[] };
    (@inner $inner:expr) => { $inner };
}

pub(super) const SEGMENT: &[Field] = fields!(kvm_segment: base, limit, selector, type_, present, dpl,
    db, s, l, g, avl, unusable);
const TABLE: &[Field] = fields!(kvm_dtable: base, limit);
const REGION: &[Field] = fields!(kvm_userspace_memory_region: slot, flags, guest_phys_addr,
    memory_size, userspace_addr);
const REGION2: &[Field] = fields!(kvm_userspace_memory_region2: slot, flags, guest_phys_addr,
    memory_size, userspace_addr, guest_memfd_offset, guest_memfd);
const REGS: &[Field] = fields!(kvm_regs: rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11,
    r12, r13, r14, r15, rip, rflags);
const SREGS: &[Field] = fields!(kvm_sregs: cs(SEGMENT), ds(SEGMENT), es(SEGMENT), fs(SEGMENT),
    gs(SEGMENT), ss(SEGMENT), tr(SEGMENT), ldt(SEGMENT), gdt(TABLE), idt(TABLE), cr0, cr2, cr3, cr4,
    cr8, efer, apic_base, interrupt_bitmap);
const SREGS2: &[Field] = fields!(kvm_sregs2: cs(SEGMENT), ds(SEGMENT), es(SEGMENT), fs(SEGMENT),
    gs(SEGMENT), ss(SEGMENT), tr(SEGMENT), ldt(SEGMENT), gdt(TABLE), idt(TABLE), cr0, cr2, cr3, cr4,
    cr8, efer, apic_base, flags, pdptrs);
const FPU: &[Field] =
    fields!(kvm_fpu: fpr, fcw, fsw, ftwx, last_opcode, last_ip, last_dp, xmm, mxcsr);
const CPUID2: &[Field] = fields!(kvm_cpuid_entry2: function, index, flags, eax, ebx, ecx, edx);
const CPUID: &[Field] = fields!(kvm_cpuid_entry: function, eax, ebx, ecx, edx);
const MSR: &[Field] = fields!(kvm_msr_entry: index, data);
const INDEX: &[Field] = &[Field {
    name: "index",
    offset: 0,
    size: 4,
    fields: &[],
}];
const ROUTE: &[Field] = &[
    Field {
        name: "gsi",
        offset: offset_of!(kvm_irq_routing_entry, gsi),
        size: 4,
        fields: &[],
    },
    Field {
        name: "type",
        offset: offset_of!(kvm_irq_routing_entry, type_),
        size: 4,
        fields: &[],
    },
    Field {
        name: "u",
        offset: offset_of!(kvm_irq_routing_entry, u),
        size: 16,
        fields: &[],
    },
];
const IRQ_LEVEL: &[Field] = &[
    Field {
        name: "irq",
        offset: 0,
        size: 4,
        fields: &[],
    },
    Field {
        name: "level",
        offset: 4,
        size: 4,
        fields: &[],
    },
];
const ZONE: &[Field] = fields!(kvm_coalesced_mmio_zone: addr, size);
const LOG: &[Field] = fields!(kvm_dirty_log: slot);
const CLEAR_LOG: &[Field] = fields!(kvm_clear_dirty_log: slot, num_pages, first_page);
const CHIP: &[Field] = fields!(kvm_irqchip: chip_id, chip);
const PIT_CONFIG: &[Field] = fields!(kvm_pit_config: flags);
const PIT: &[Field] = fields!(kvm_pit_state: channels);
const PIT2: &[Field] = fields!(kvm_pit_state2: channels, flags);
const REINJECT: &[Field] = fields!(kvm_reinject_control: pit_reinject);
const MSI: &[Field] = fields!(kvm_msi: address_lo, address_hi, data, flags, devid);
const IRQFD: &[Field] = fields!(kvm_irqfd: fd, gsi, flags, resamplefd);
const IOEVENTFD: &[Field] = fields!(kvm_ioeventfd: datamatch, addr, len, fd, flags);
const CLOCK: &[Field] = fields!(kvm_clock_data: clock, flags, realtime, host_tsc);
const CAP: &[Field] = fields!(kvm_enable_cap: cap, flags, args);
const DEVICE: &[Field] = fields!(kvm_create_device: type_, fd, flags);
const ATTR: &[Field] = fields!(kvm_device_attr: flags, group, attr, addr);
const LAPIC: &[Field] = fields!(kvm_lapic_state: regs);
const EVENTS: &[Field] = fields!(kvm_vcpu_events: exception, interrupt, nmi, sipi_vector, flags, smi,
    triple_fault, exception_has_payload, exception_payload);
const DEBUGREGS: &[Field] = fields!(kvm_debugregs: db, dr6, dr7, flags);
const XCRS: &[Field] = fields!(kvm_xcrs: nr_xcrs, flags, xcrs);
const XSAVE: &[Field] = fields!(kvm_xsave: region);
const MP_STATE: &[Field] = fields!(kvm_mp_state: mp_state);
const INTERRUPT: &[Field] = fields!(kvm_interrupt: irq);
const GUEST_DEBUG: &[Field] = fields!(kvm_guest_debug: control, arch);
const TRANSLATION: &[Field] =
    fields!(kvm_translation: linear_address, physical_address, valid, writeable, usermode);
const VAPIC: &[Field] = fields!(kvm_vapic_addr: vapic_addr);
const TPR: &[Field] = fields!(kvm_tpr_access_ctl: enabled, flags);
const CONNECTION: &[Field] = fields!(kvm_hyperv_eventfd: conn_id, fd, flags);
const MCE: &[Field] = fields!(kvm_x86_mce: status, addr, misc, mcg_status, bank);
const FILTER: &[Field] = fields!(kvm_msr_filter: flags);
const SIGNALS: &[Field] = &[
    Field {
        name: "len",
        offset: 0,
        size: 4,
        fields: &[],
    },
    Field {
        name: "sigset",
        offset: 4,
        size: 8,
        fields: &[],
    },
];
const ATTRIBUTES: &[Field] = fields!(kvm_memory_attributes: address, size, attributes, flags);
const PRE_FAULT: &[Field] = fields!(kvm_pre_fault_memory: gpa, size, flags);

/// True for calls whose number says that KVM writes the structure, although it only reads it.
pub(super) fn is_input(number: u32) -> bool {
    [KVM_SET_IRQCHIP, KVM_SET_PIT, KVM_REINJECT_CONTROL].contains(&number)
}

const fn list(at: usize, size: usize, entry: &'static [Field], only_count: bool) -> Shape {
    Shape::List {
        at,
        size,
        entry,
        only_count,
    }
}

/// Returns the type of a call's argument; nothing for unknown numbers.
pub(super) fn shape_of(number: u32) -> Shape {
    const CPUID2_SIZE: usize = size_of::<kvm_cpuid_entry2>();
    match number {
        KVM_CREATE_VM | KVM_CHECK_EXTENSION | KVM_CREATE_VCPU | KVM_SET_TSS_ADDR
        | KVM_SET_BOOT_CPU_ID | KVM_SET_TSC_KHZ | KVM_SET_NR_MMU_PAGES => Shape::Number,
        KVM_SET_IDENTITY_MAP_ADDR | KVM_X86_SETUP_MCE | KVM_X86_GET_MCE_CAP_SUPPORTED => {
            Shape::Word
        }
        KVM_SET_USER_MEMORY_REGION => Shape::Struct(REGION),
        KVM_SET_USER_MEMORY_REGION2 => Shape::Struct(REGION2),
        KVM_GET_REGS | KVM_SET_REGS => Shape::Struct(REGS),
        KVM_GET_SREGS | KVM_SET_SREGS => Shape::Struct(SREGS),
        KVM_GET_SREGS2 | KVM_SET_SREGS2 => Shape::Struct(SREGS2),
        KVM_GET_FPU | KVM_SET_FPU => Shape::Struct(FPU),
        KVM_GET_SUPPORTED_CPUID
        | KVM_GET_EMULATED_CPUID
        | KVM_GET_CPUID2
        | KVM_GET_SUPPORTED_HV_CPUID => list(8, CPUID2_SIZE, CPUID2, true),
        KVM_SET_CPUID2 => list(8, CPUID2_SIZE, CPUID2, false),
        KVM_SET_CPUID => list(8, size_of::<kvm_cpuid_entry>(), CPUID, false),
        KVM_GET_MSRS | KVM_SET_MSRS => list(8, size_of::<kvm_msr_entry>(), MSR, false),
        KVM_GET_MSR_INDEX_LIST | KVM_GET_MSR_FEATURE_INDEX_LIST => list(4, 4, INDEX, true),
        KVM_SET_GSI_ROUTING => list(8, size_of::<kvm_irq_routing_entry>(), ROUTE, false),
        KVM_IRQ_LINE | KVM_IRQ_LINE_STATUS => Shape::Struct(IRQ_LEVEL),
        KVM_REGISTER_COALESCED_MMIO | KVM_UNREGISTER_COALESCED_MMIO => Shape::Struct(ZONE),
        KVM_GET_DIRTY_LOG => Shape::Struct(LOG),
        KVM_CLEAR_DIRTY_LOG => Shape::Struct(CLEAR_LOG),
        KVM_GET_IRQCHIP | KVM_SET_IRQCHIP => Shape::Struct(CHIP),
        KVM_CREATE_PIT2 => Shape::Struct(PIT_CONFIG),
        KVM_GET_PIT | KVM_SET_PIT => Shape::Struct(PIT),
        KVM_GET_PIT2 | KVM_SET_PIT2 => Shape::Struct(PIT2),
        KVM_REINJECT_CONTROL => Shape::Struct(REINJECT),
        KVM_SIGNAL_MSI => Shape::Struct(MSI),
        KVM_IRQFD => Shape::Struct(IRQFD),
        KVM_IOEVENTFD => Shape::Struct(IOEVENTFD),
        KVM_GET_CLOCK | KVM_SET_CLOCK => Shape::Struct(CLOCK),
        KVM_ENABLE_CAP => Shape::Struct(CAP),
        KVM_CREATE_DEVICE => Shape::Struct(DEVICE),
        KVM_SET_DEVICE_ATTR | KVM_GET_DEVICE_ATTR | KVM_HAS_DEVICE_ATTR => Shape::Struct(ATTR),
        KVM_GET_LAPIC | KVM_SET_LAPIC => Shape::Struct(LAPIC),
        KVM_GET_VCPU_EVENTS | KVM_SET_VCPU_EVENTS => Shape::Struct(EVENTS),
        KVM_GET_DEBUGREGS | KVM_SET_DEBUGREGS => Shape::Struct(DEBUGREGS),
        KVM_GET_XCRS | KVM_SET_XCRS => Shape::Struct(XCRS),
        KVM_GET_XSAVE | KVM_SET_XSAVE | KVM_GET_XSAVE2 => Shape::Struct(XSAVE),
        KVM_GET_MP_STATE | KVM_SET_MP_STATE => Shape::Struct(MP_STATE),
        KVM_INTERRUPT => Shape::Struct(INTERRUPT),
        KVM_SET_GUEST_DEBUG => Shape::Struct(GUEST_DEBUG),
        KVM_TRANSLATE => Shape::Struct(TRANSLATION),
        KVM_SET_VAPIC_ADDR => Shape::Struct(VAPIC),
        KVM_TPR_ACCESS_REPORTING => Shape::Struct(TPR),
        KVM_HYPERV_EVENTFD => Shape::Struct(CONNECTION),
        KVM_X86_SET_MCE => Shape::Struct(MCE),
        KVM_X86_SET_MSR_FILTER => Shape::Struct(FILTER),
        KVM_SET_SIGNAL_MASK => Shape::Struct(SIGNALS),
        KVM_SET_MEMORY_ATTRIBUTES => Shape::Struct(ATTRIBUTES),
        KVM_PRE_FAULT_MEMORY => Shape::Struct(PRE_FAULT),
        _ => Shape::Nothing,
    }
}
