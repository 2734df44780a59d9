//! Hyper-V's hypercalls (Hypervisor Top-Level Functional Specification, "Hypercall Interface").

use std::sync::{Arc, atomic::Ordering};

use irqchip::{DeliveryMode, LapicIrq};
use x86_cpu::{CpuState, Exception, Fault};
use x86_defs::reg::{R8, RAX, RBX, RCX, RDI, RDX, RSI};

use super::Bus;
use crate::{
    Exit, HyperVExit,
    shared::VcpuShared,
    system::hv_cpuid::{feature, recommended, right},
    vcpu::replay::DeviceAccess,
};

/// HV_STATUS_*.
mod status {
    pub(super) const SUCCESS: u64 = 0;
    pub(super) const INVALID_CODE: u64 = 2;
    pub(super) const INVALID_INPUT: u64 = 3;
    pub(super) const INVALID_ALIGNMENT: u64 = 4;
    pub(super) const INVALID_PARAMETER: u64 = 5;
    pub(super) const ACCESS_DENIED: u64 = 6;
    pub(super) const OPERATION_DENIED: u64 = 8;
}

/// HVCALL_*.
mod code {
    pub(super) const FLUSH_SPACE: u16 = 0x2;
    pub(super) const FLUSH_LIST: u16 = 0x3;
    pub(super) const NOTIFY_LONG_SPIN_WAIT: u16 = 0x8;
    pub(super) const SEND_IPI: u16 = 0xb;
    pub(super) const FLUSH_SPACE_EX: u16 = 0x13;
    pub(super) const FLUSH_LIST_EX: u16 = 0x14;
    pub(super) const SEND_IPI_EX: u16 = 0x15;
    pub(super) const POST_MESSAGE: u16 = 0x5c;
    pub(super) const SIGNAL_EVENT: u16 = 0x5d;
    pub(super) const POST_DEBUG_DATA: u16 = 0x69;
    pub(super) const RETRIEVE_DEBUG_DATA: u16 = 0x6a;
    pub(super) const RESET_DEBUG_SESSION: u16 = 0x6b;
    /// Calls that the VMM implements. The first of them asks which of the others exist.
    pub(super) const EXTENDED: std::ops::RangeInclusive<u16> = 0x8001..=0x8041;
}

/// HV_X64_SYNDBG_OPTION_USE_HCALLS.
const DEBUG_BY_CALLS: u64 = 1 << 2;

/// A hypercall's input.
#[derive(Clone, Copy, Debug)]
struct Call {
    control: u64,
    code: u16,
    /// The arguments are in registers.
    is_fast: bool,
    /// Length in 8-byte words of the arguments' variable part.
    variable: u32,
    repeats: u16,
    first: u16,
    /// The two input registers: addresses, or with `is_fast` the arguments.
    input: [u64; 2],
}

impl Call {
    fn of(cpu: &CpuState) -> Self {
        let pair = |high: usize, low: usize| cpu.gpr[high] << 32 | cpu.gpr[low] & 0xffff_ffff;
        let (control, input) = if cpu.is_64bit() {
            (cpu.gpr[RCX], [cpu.gpr[RDX], cpu.gpr[R8]])
        } else {
            (pair(RDX, RAX), [pair(RBX, RCX), pair(RDI, RSI)])
        };
        Self {
            control,
            code: control as u16,
            is_fast: control >> 16 & 1 != 0,
            variable: (control >> 17 & 0x3ff) as u32,
            repeats: (control >> 32 & 0xfff) as u16,
            first: (control >> 48 & 0xfff) as u16,
            input,
        }
    }

    const fn repeats(&self) -> bool {
        self.repeats != 0 || self.first != 0
    }

    /// True if fast arguments continue in SSE registers.
    const fn uses_sse(&self) -> bool {
        self.is_fast
            && matches!(
                self.code,
                code::FLUSH_SPACE
                    | code::FLUSH_LIST
                    | code::FLUSH_SPACE_EX
                    | code::FLUSH_LIST_EX
                    | code::SEND_IPI_EX
            )
    }

    /// Returns the first `N` words of the arguments.
    fn words<const N: usize>(&self, bus: &Bus, cpu: &CpuState) -> Option<[u64; N]> {
        if self.is_fast {
            return Some(std::array::from_fn(|i| match i {
                0 | 1 => self.input[i],
                // Six SSE registers with two words each.
                2..14 => (cpu.fp.xmm(i / 2 - 1) >> (i % 2 * 64)) as u64,
                _ => 0,
            }));
        }
        let mut words = [[0; 8]; N];
        let is_there = bus
            .vm
            .memory
            .read_bytes(self.input[0], words.as_flattened_mut());
        is_there.then(|| words.map(u64::from_le_bytes))
    }

    /// Returns the words of a sparse set of processors, which begin at argument `from`.
    fn banks(&self, bus: &Bus, cpu: &CpuState, from: usize, nr: usize) -> Option<[u64; 64]> {
        let mut words = [[0; 8]; 64];
        let given = words.get_mut(..nr)?;
        if self.is_fast {
            let all = self.words::<14>(bus, cpu)?;
            for (to, word) in given.iter_mut().zip(all.get(from..from + nr)?) {
                *to = word.to_le_bytes();
            }
        } else {
            let gpa = self.input[0].wrapping_add(8 * from as u64);
            if !bus.vm.memory.read_bytes(gpa, given.as_flattened_mut()) {
                return None;
            }
        }
        Some(words.map(u64::from_le_bytes))
    }
}

/// Executes VMCALL or VMMCALL.
pub(in crate::vcpu) fn execute(bus: &mut Bus, cpu: &mut CpuState) -> Result<(), Fault> {
    if cpu.cpl != 0 || cpu.cr0 & 1 == 0 {
        return Err(Exception::UD.into());
    }
    bus.counters.hypercalls += 1;
    let call = Call::of(cpu);
    let result = answer(bus, cpu, call)?;
    if cpu.is_64bit() {
        cpu.gpr[RAX] = result;
    } else {
        cpu.gpr[RDX] = result >> 32;
        cpu.gpr[RAX] = result & 0xffff_ffff;
    }
    Ok(())
}

fn is_allowed(bus: &Bus, code: u16) -> bool {
    let [advice, spins] = bus.hv.recommendations;
    let [_, rights, _] = bus.hv.features;
    let advised = |bits| advice & bits == bits;
    let is_promised = match code {
        code::NOTIFY_LONG_SPIN_WAIT => !matches!(spins, 0 | u32::MAX),
        code::SEND_IPI => advised(recommended::IPI),
        code::SEND_IPI_EX => advised(recommended::IPI | recommended::SPARSE),
        code::FLUSH_SPACE | code::FLUSH_LIST => advised(recommended::FLUSH),
        code::FLUSH_SPACE_EX | code::FLUSH_LIST_EX => {
            advised(recommended::FLUSH | recommended::SPARSE)
        }
        _ if code::EXTENDED.contains(&code) => rights & right::EXTENDED != 0,
        code::POST_MESSAGE => rights & right::POST_MESSAGES != 0,
        code::SIGNAL_EVENT => rights & right::SIGNAL_EVENTS != 0,
        code::POST_DEBUG_DATA | code::RETRIEVE_DEBUG_DATA | code::RESET_DEBUG_SESSION => {
            !bus.hv.has_debugger || rights & right::DEBUG != 0
        }
        _ => true,
    };
    is_promised || !bus.hv.enforces
}

fn answer(bus: &mut Bus, cpu: &mut CpuState, call: Call) -> Result<u64, Fault> {
    if !is_allowed(bus, call.code) {
        return Ok(status::ACCESS_DENIED);
    }
    let [_, _, promised] = bus.hv.features;
    if call.uses_sse() && bus.hv.enforces && promised & feature::SSE_INPUT == 0 {
        return Err(Exception::UD.into());
    }
    let is_list = matches!(call.code, code::FLUSH_LIST | code::FLUSH_LIST_EX);
    let is_known = matches!(
        call.code,
        code::FLUSH_SPACE
            | code::FLUSH_SPACE_EX
            | code::NOTIFY_LONG_SPIN_WAIT
            | code::SEND_IPI
            | code::SEND_IPI_EX
            | code::POST_MESSAGE
            | code::SIGNAL_EVENT
    );
    let is_well_repeated = if is_list {
        call.repeats != 0 && call.first == 0
    } else {
        !is_known || !call.repeats()
    };
    if !is_well_repeated {
        return Ok(status::INVALID_INPUT);
    }
    let result = match call.code {
        code::NOTIFY_LONG_SPIN_WAIT => {
            bus.give_way(cpu);
            Some(status::SUCCESS)
        }
        code::SEND_IPI => send_ipi(bus, cpu, call),
        code::SEND_IPI_EX => send_ipi_ex(bus, cpu, call),
        code::FLUSH_SPACE | code::FLUSH_LIST => flush(bus, cpu, call),
        code::FLUSH_SPACE_EX | code::FLUSH_LIST_EX => flush_ex(bus, cpu, call),
        code::SIGNAL_EVENT => return signal_event(bus, cpu, call),
        code::POST_MESSAGE => return post_message(bus, cpu, call),
        code::POST_DEBUG_DATA | code::RETRIEVE_DEBUG_DATA | code::RESET_DEBUG_SESSION => {
            return debug(bus, cpu, call);
        }
        _ if !code::EXTENDED.contains(&call.code) => Some(status::INVALID_CODE),
        _ if call.is_fast => Some(status::INVALID_PARAMETER),
        _ => return ask(bus, cpu, call),
    };
    Ok(result.unwrap_or(status::INVALID_INPUT))
}

/// Asks the VMM to execute a hypercall.
fn ask(bus: &mut Bus, cpu: &CpuState, call: Call) -> Result<u64, Fault> {
    let access = DeviceAccess::Hypercall { nr: call.control };
    let exit = || {
        Exit::HyperV(HyperVExit::Call {
            input: call.control,
            params: call.input,
        })
    };
    Ok(bus.ask(cpu, access, exit)?.value)
}

/// HvCallPostMessage: for a VMM that can answer through a synthetic interrupt controller.
fn post_message(bus: &mut Bus, cpu: &CpuState, call: Call) -> Result<u64, Fault> {
    if !bus.hv.synic.is_active {
        return Ok(status::INVALID_INPUT);
    }
    ask(bus, cpu, call)
}

/// HvCallSignalEvent: signals the connection's eventfd, or asks the VMM.
fn signal_event(bus: &mut Bus, cpu: &CpuState, call: Call) -> Result<u64, Fault> {
    /// Bits of the connection; the event's number is above them.
    const CONNECTION: u64 = kvm_bindings::KVM_HYPERV_CONN_ID_MASK as u64;
    const NUMBER: u64 = 0xffff << 32;
    let access = DeviceAccess::Hypercall { nr: call.control };
    if bus.replay.is_new(access) {
        let [address, _] = call.input;
        let is_aligned = call.is_fast || address.is_multiple_of(8);
        let event = call.words(bus, cpu).filter(|_| is_aligned);
        let Some([event]) = event else {
            return Ok(status::INVALID_ALIGNMENT);
        };
        if event & NUMBER == 0 {
            if event & !CONNECTION != 0 {
                return Ok(status::INVALID_INPUT);
            }
            if bus.vm.hyperv.signal(event as u32) {
                return Ok(status::SUCCESS);
            }
        }
    }
    post_message(bus, cpu, call)
}

/// The debugger's hypercalls, which the VMM executes if the guest has asked for them.
fn debug(bus: &mut Bus, cpu: &CpuState, call: Call) -> Result<u64, Fault> {
    if call.is_fast && call.code != code::RESET_DEBUG_SESSION {
        return Ok(status::INVALID_INPUT);
    }
    if !bus.hv.has_debugger {
        return Ok(status::INVALID_CODE);
    }
    if bus.vm.hyperv.partition().debugger.options & DEBUG_BY_CALLS == 0 {
        return Ok(status::OPERATION_DENIED);
    }
    ask(bus, cpu, call)
}

/// A sparse set of processors.
struct Set {
    /// Bit per bank of 64 processors that has a word.
    banks: u64,
    words: [u64; 64],
}

impl Set {
    const SPARSE: u64 = 0;
    const ALL: u64 = 1;

    fn has(&self, vp: u32) -> bool {
        let (bank, bit) = (vp / 64, vp % 64);
        if bank >= 64 || self.banks >> bank & 1 == 0 {
            return false;
        }
        let before = (self.banks & ((1u64 << bank) - 1)).count_ones() as usize;
        self.words
            .get(before)
            .is_some_and(|word| word >> bit & 1 != 0)
    }
}

/// HvCallSendSyntheticClusterIpi: a vector, and a bit for each of the first 64 processors.
fn send_ipi(bus: &Bus, cpu: &CpuState, call: Call) -> Option<u64> {
    let [vector, mask] = call.words(bus, cpu)?;
    // The upper half of the first word is the target's privilege level; only one level exists.
    send(bus, vector as u32, |vp| vp < 64 && mask >> vp & 1 != 0)
}

/// HvCallSendSyntheticClusterIpiEx: a bit for each bank of 64 processors that has a word.
fn send_ipi_ex(bus: &Bus, cpu: &CpuState, call: Call) -> Option<u64> {
    let [vector, format, banks] = call.words(bus, cpu)?;
    if format == Set::ALL {
        return send(bus, vector as u32, |_| true);
    }
    let nr = banks.count_ones();
    if format != Set::SPARSE || nr != call.variable {
        return None;
    }
    if nr == 0 {
        return Some(status::SUCCESS);
    }
    let words = call.banks(bus, cpu, 3, nr as usize)?;
    let set = Set { banks, words };
    send(bus, vector as u32, |vp| set.has(vp))
}

/// Sends a fixed interrupt to the processors whose index is wanted.
fn send(bus: &Bus, vector: u32, is_wanted: impl Fn(u32) -> bool) -> Option<u64> {
    /// HV_IPI_LOW_VECTOR.
    const LOWEST: u8 = 16;
    let vector = u8::try_from(vector).ok().filter(|v| *v >= LOWEST)?;
    if bus.vm.chips().is_some() {
        for target in bus.vm.vcpus().iter() {
            if is_wanted(target.vp_index.load(Ordering::Relaxed)) {
                target.interrupt(&LapicIrq::edge(target.id, DeliveryMode::Fixed, vector));
            }
        }
    }
    Some(status::SUCCESS)
}

/// Flag of a flush: it is for all processors, which are not listed.
const ALL_PROCESSORS: u64 = 1;

/// HvCallFlushVirtualAddressSpace and -List, whose arguments are address space, flags and processors. Everything is
/// flushed, which is more than a list asks for.
fn flush(bus: &mut Bus, cpu: &mut CpuState, call: Call) -> Option<u64> {
    let [_, flags, mask] = call.words(bus, cpu)?;
    // As in KVM, an empty mask means all processors, because some systems use it so.
    let all = flags & ALL_PROCESSORS != 0 || mask == 0;
    let is_wanted = |vp: u32| all || vp < 64 && mask >> vp & 1 != 0;
    Some(flush_processors(bus, cpu, call, is_wanted))
}

/// Like [`flush`], with a sparse set of processors.
fn flush_ex(bus: &mut Bus, cpu: &mut CpuState, call: Call) -> Option<u64> {
    let [_, flags, format, banks] = call.words(bus, cpu)?;
    let nr = banks.count_ones();
    if nr != call.variable {
        return None;
    }
    if flags & ALL_PROCESSORS != 0 || format != Set::SPARSE {
        return Some(flush_processors(bus, cpu, call, |_| true));
    }
    let words = call.banks(bus, cpu, 4, nr as usize)?;
    let set = Set { banks, words };
    Some(flush_processors(bus, cpu, call, |vp| set.has(vp)))
}

fn flush_processors(
    bus: &mut Bus,
    cpu: &mut CpuState,
    call: Call,
    is_wanted: impl Fn(u32) -> bool,
) -> u64 {
    let mut targets: Vec<Arc<VcpuShared>> = bus.vm.vcpus().clone();
    targets.retain(|vcpu| is_wanted(vcpu.vp_index.load(Ordering::Relaxed)));
    bus.flush_translations_of(cpu, &targets);
    // All repetitions are done.
    status::SUCCESS | u64::from(call.repeats) << 32
}
