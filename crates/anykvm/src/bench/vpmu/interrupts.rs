//! Measures what an overflow costs: a loop whose instructions are counted, with an NMI after a fixed number of them,
//! and without.

use std::time::Instant;

use anykvm_ioctls::VcpuExit;
use vm_memory::{Bytes, GuestAddress};

use super::{COUNTING, Registers, looping_with, wrmsr};
use crate::bench::bare::Bare;
use crate::bench::report::Verdict;
use crate::error::BootError;

/// Number of iterations of a loop of two instructions between two exits; of runs, of which the fastest counts; and of
/// instructions from one overflow to the next.
const TURNS: u32 = 500_000;
const RUNS: u32 = 40;
const PERIOD: u32 = 20_000;
const BAR_US: f64 = 10.0;

const HANDLER: u64 = 0x8000;
const GDT: u64 = 0x6000;
const IDT: u64 = 0x7000;
/// Bit of the event select that makes an overflow interrupt.
const INT: u32 = 1 << 20;
/// x2APIC registers: the spurious interrupt vector, and LVTPC; and LVTPC's value for an NMI.
const SVR: u32 = 0x80f;
const LVTPC: u32 = 0x834;
const NMI: u32 = 4 << 8;

/// Returns code that sets the counter so many events before its overflow.
fn rearm(r: &Registers) -> Vec<u8> {
    let mut code = wrmsr(r.counter, PERIOD.wrapping_neg());
    // MOV EDX, 0xffff takes the place of XOR EDX, EDX.
    code.truncate(code.len() - 4);
    code.extend([0xba, 0xff, 0xff, 0, 0, 0x0f, 0x30]);
    code
}

/// Makes a guest that runs the loop for ever.
fn guest(before: &[u8], handler: &[u8]) -> Result<Bare, BootError> {
    let bare = looping_with(before, &[], TURNS, true)?;
    let write = |at: u64, bytes: &[u8]| {
        bare.ram
            .write_slice(bytes, GuestAddress(at))
            .map_err(BootError::guest("a handler"))
    };
    write(HANDLER, handler)?;
    write(GDT + 8, &0x00af_9b00_0000_ffff_u64.to_le_bytes())?;
    write(GDT + 16, &0x00cf_9300_0000_ffff_u64.to_le_bytes())?;
    write(
        IDT + 2 * 16,
        &(HANDLER | 8 << 16 | 0x8e << 40).to_le_bytes(),
    )?;
    let mut s = (bare.vcpu.get_sregs()).map_err(BootError::kvm("KVM_GET_SREGS"))?;
    (s.cs.selector, s.ss.selector) = (8, 16);
    (s.gdt.base, s.gdt.limit) = (GDT, 23);
    (s.idt.base, s.idt.limit) = (IDT, 15 * 16 - 1);
    s.apic_base |= 0xc00;
    (bare.vcpu.set_sregs(&s)).map_err(BootError::kvm("KVM_SET_SREGS"))?;
    Ok(bare)
}

/// Returns the microseconds from the instruction that overflows the counter to the one after the handler.
pub(super) fn measure(r: &Registers, verdict: &mut Verdict) -> Result<String, BootError> {
    let apic = [wrmsr(SVR, 0x1ff), wrmsr(LVTPC, NMI)].concat();
    let quiet = [&apic[..], &wrmsr(r.counter, 0), &wrmsr(r.select, COUNTING)].concat();
    let noisy = [&apic[..], &rearm(r), &wrmsr(r.select, COUNTING | INT)].concat();
    let handler = [
        &[0x50, 0x51, 0x52][..],
        &wrmsr(r.overflow_clear, 1),
        &rearm(r),
        &wrmsr(LVTPC, NMI),
        // inc qword [0x9000]; pop rdx, rcx, rax; iretq
        &[
            0x48, 0xff, 0x04, 0x25, 0, 0x90, 0, 0, 0x5a, 0x59, 0x58, 0x48, 0xcf,
        ],
    ]
    .concat();
    let mut guests = [guest(&quiet, &handler)?, guest(&noisy, &handler)?];
    let mut best = [f64::INFINITY; 2];
    let seen = |bare: &Bare| {
        let n: Result<u64, _> = bare.ram.read_obj(GuestAddress(0x9000));
        n.map_err(BootError::guest("a handler\'s count"))
    };
    let mut interrupts = 0;
    for _ in 0..RUNS {
        for (bare, best) in guests.iter_mut().zip(&mut best) {
            let before = seen(bare)?;
            let begin = Instant::now();
            match bare.vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
                VcpuExit::IoOut(..) => {}
                exit => return Err(BootError::NoImage(format!("unexpected exit: {exit:?}"))),
            }
            *best = best.min(begin.elapsed().as_secs_f64() * 1e6);
            interrupts = seen(bare)? - before;
        }
    }
    if interrupts == 0 {
        return Err(BootError::NoImage("no counter has interrupted".to_owned()));
    }
    let [without, with] = best;
    let each = (with - without).max(0.0) / interrupts as f64;
    verdict.at_most("overflow and its handler, us", each, BAR_US);
    Ok(format!(
        "\nAn overflow, its NMI, a handler that sets the counter again, and the way back: {each:.2} us, {interrupts} in a run \
         (2019: 3500 us before, 8.8 us after, at most).\n"
    ))
}
