//! The run page seen from both mappings.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use super::*;
use crate::memfd;
use hypervisor::IoData;

/// The hypervisor's side and a VMM's own mapping of the same file.
fn pages() -> (RunPage, RunPage) {
    let fd = memfd::create(c"kvm-vcpu:test", VCPU_MMAP_SIZE, true).unwrap();
    (
        RunPage::map(fd.as_fd()).unwrap(),
        RunPage::map(fd.as_fd()).unwrap(),
    )
}

const STATUS: RunStatus = RunStatus {
    ready_for_interrupt_injection: true,
    if_flag: true,
    cr8: 3,
    apic_base: 0xfee0_0900,
    in_smm: false,
};

fn exit_reason(page: &RunPage) -> u32 {
    // SAFETY: inside the mapping.
    unsafe { (*page.run.as_ptr()).exit_reason }
}

#[test]
fn an_out_shows_its_bytes_in_the_pio_page() {
    let (ours, vmm) = pages();
    let question = ours.store(
        &(Exit::Io {
            is_in: false,
            port: 0x3f8,
            size: 2,
            count: 2,
            data: IoData::new(0x0403_0201, 4),
        }),
        &STATUS,
    );
    assert_eq!(question, Question::None);
    assert_eq!(exit_reason(&vmm), KVM_EXIT_IO);
    let io = vmm.union::<Io>();
    assert_eq!((io.direction, io.size, io.port, io.count), (1, 2, 0x3f8, 2));
    assert_eq!(io.data_offset, 4096);
    // SAFETY: the PIO page is mapped.
    let bytes = unsafe { std::slice::from_raw_parts(vmm.pio_data(), 4) };
    assert_eq!(bytes, [1, 2, 3, 4]);
}

#[test]
fn an_in_is_answered_from_the_pio_page() {
    let (ours, vmm) = pages();
    let question = ours.store(
        &(Exit::Io {
            is_in: true,
            port: 0x60,
            size: 1,
            count: 3,
            data: IoData::default(),
        }),
        &STATUS,
    );
    assert_eq!(question, Question::Io { len: 3 });
    // SAFETY: the PIO page is mapped.
    unsafe { vmm.pio_data().copy_from([7, 8, 9].as_ptr(), 3) };
    let mut buffer = [0; PAGE_SIZE];
    match ours.answer(question, &mut buffer) {
        Answer::Io(bytes) => assert_eq!(bytes, [7, 8, 9]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_oversized_string_stays_inside_the_pio_page() {
    let (ours, _) = pages();
    let exit = |is_in| Exit::Io {
        is_in,
        port: 1,
        size: 4,
        count: u32::MAX,
        data: IoData::new(u32::MAX, 4),
    };
    assert_eq!(ours.store(&exit(false), &STATUS), Question::None);
    let question = ours.store(&exit(true), &STATUS);
    assert_eq!(question, Question::Io { len: 4096 });
}

#[test]
fn an_in_asks_for_as_many_bytes_as_it_reads() {
    let (ours, vmm) = pages();
    for (size, wanted) in [(1, 0x08), (2, 0x0708), (4, 0x0506_0708)] {
        let exit = Exit::Io {
            is_in: true,
            port: 0x60,
            size,
            count: 1,
            data: IoData::default(),
        };
        let question = ours.store(&exit, &STATUS);
        assert_eq!(question, Question::Port { len: size });
        // SAFETY: the PIO page is mapped.
        unsafe { vmm.pio_data().cast::<u64>().write(0x0102_0304_0506_0708) };
        match ours.answer(question, &mut [0; PAGE_SIZE]) {
            Answer::Word(word) => assert_eq!(word, wanted),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn mmio_reads_ask_and_writes_do_not() {
    let (ours, vmm) = pages();
    let exit = |is_write| Exit::Mmio {
        gpa: 0xfee0_0000,
        len: 4,
        is_write,
        data: [1, 2, 3, 4, 0, 0, 0, 0],
    };
    assert_eq!(ours.store(&exit(true), &STATUS), Question::None);
    let question = ours.store(&exit(false), &STATUS);
    assert_eq!(question, Question::Mmio { len: 4 });
    assert_eq!(exit_reason(&vmm), KVM_EXIT_MMIO);
    let mut mmio = vmm.union::<Mmio>();
    assert_eq!(
        (mmio.phys_addr, mmio.len, mmio.is_write),
        (0xfee0_0000, 4, 0)
    );
    mmio.data = [9; 8];
    vmm.set_union(mmio);
    match ours.answer(question, &mut [0; PAGE_SIZE]) {
        Answer::Word(data) => assert_eq!(data, 0x0909_0909),
        other => panic!("{other:?}"),
    }
}

#[test]
fn msr_and_hypercall_answers_come_from_the_union() {
    let (ours, vmm) = pages();
    let question = ours.store(
        &(Exit::Rdmsr {
            index: 0x123,
            reason: KVM_MSR_EXIT_REASON_UNKNOWN,
        }),
        &STATUS,
    );
    let mut msr = vmm.union::<Msr>();
    assert_eq!((msr.index, msr.reason, msr.error), (0x123, 2, 0));
    (msr.data, msr.error) = (0xdead_beef, 1);
    vmm.set_union(msr);
    match ours.answer(question, &mut [0; PAGE_SIZE]) {
        Answer::Msr { data, error } => assert_eq!((data, error), (0xdead_beef, true)),
        other => panic!("{other:?}"),
    }
    let question = ours.store(
        &(Exit::Hypercall {
            nr: 12,
            args: [1, 2, 3, 4, 5, 6],
            longmode: true,
        }),
        &STATUS,
    );
    let mut hypercall = vmm.union::<Hypercall>();
    assert_eq!((hypercall.nr, hypercall.args[5]), (12, 6));
    hypercall.ret = 77;
    vmm.set_union(hypercall);
    match ours.answer(question, &mut [0; PAGE_SIZE]) {
        Answer::Hypercall(ret) => assert_eq!(ret, 77),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_exit_has_its_reason_and_the_status_fields() {
    let internal = Exit::InternalError {
        suberror: KVM_INTERNAL_ERROR_EMULATION,
        data: vec![5; 40],
    };
    let debug = Exit::Debug {
        exception: 1,
        pc: 2,
        dr6: 3,
        dr7: 4,
    };
    let wrmsr = Exit::Wrmsr {
        index: 1,
        data: 2,
        reason: 1,
    };
    let (ours, vmm) = pages();
    for (exit, reason) in [
        (Exit::Hlt, KVM_EXIT_HLT),
        (Exit::Shutdown, KVM_EXIT_SHUTDOWN),
        (Exit::IrqWindowOpen, KVM_EXIT_IRQ_WINDOW_OPEN),
        (Exit::SetTpr, KVM_EXIT_SET_TPR),
        (Exit::IoapicEoi { vector: 9 }, KVM_EXIT_IOAPIC_EOI),
        (Exit::MemoryFault { gpa: 0x8000 }, KVM_EXIT_MEMORY_FAULT),
        (Exit::SystemEvent { kind: 2 }, KVM_EXIT_SYSTEM_EVENT),
        (internal, KVM_EXIT_INTERNAL_ERROR),
        (debug, KVM_EXIT_DEBUG),
        (wrmsr, KVM_EXIT_X86_WRMSR),
    ] {
        ours.store(&exit, &STATUS);
        assert_eq!(exit_reason(&vmm), reason);
    }
    // SAFETY: inside the mapping.
    let run = unsafe { vmm.run.as_ref() };
    assert_eq!((run.if_flag, run.ready_for_interrupt_injection), (1, 1));
    assert_eq!((run.cr8, run.apic_base, run.flags), (3, 0xfee0_0900, 0));
}

#[test]
fn immediate_exit_is_the_same_byte_in_both_mappings() {
    let (ours, vmm) = pages();
    vmm.immediate_exit().store(1, Ordering::Release);
    assert_eq!(ours.immediate_exit().load(Ordering::Acquire), 1);
}
