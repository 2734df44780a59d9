//! Executes an IN, OUT or MOV that makes a single access, without an interpreter around it. Translated code comes here
//! when it finds that it cannot make the access itself: mostly in a driver, to its device. All other instructions need
//! the interpreter.

use iced_x86::Code;
use x86_cpu::{CpuState, Fault, GuestBus, Privilege, Retired};
use x86_defs::reg;

use crate::{
    Insn, Interp, RunStop,
    registers::{reg_read, reg_write_sized},
    remainder::{NONE, Remainder},
};

/// What the instruction does with its operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AccessKind {
    /// IN; true if the port is the immediate, false if it is DX.
    PortIn(bool),
    PortOut(bool),
    Load,
    Store,
    StoreImmediate,
}

/// An instruction that makes exactly one access, from or to a register, and does nothing else.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    kind: AccessKind,
    /// Number of the register.
    register: u8,
    /// Size of the access in bytes.
    size: u8,
    /// Length of the instruction in bytes.
    len: u8,
    /// The streams that it counts in.
    events: u16,
    imm: u64,
}

impl Transfer {
    /// Returns `None` for any other instruction.
    pub fn of<B>(insn: &Insn<B>) -> Option<Self> {
        use Code as C;
        let kind = match insn.code {
            C::In_AL_imm8 | C::In_AX_imm8 | C::In_EAX_imm8 => AccessKind::PortIn(true),
            C::In_AL_DX | C::In_AX_DX | C::In_EAX_DX => AccessKind::PortIn(false),
            C::Out_imm8_AL | C::Out_imm8_AX | C::Out_imm8_EAX => AccessKind::PortOut(true),
            C::Out_DX_AL | C::Out_DX_AX | C::Out_DX_EAX => AccessKind::PortOut(false),
            _ if !insn.has_mem() => return None,
            C::Mov_r8_rm8
            | C::Mov_r16_rm16
            | C::Mov_r32_rm32
            | C::Mov_r64_rm64
            | C::Mov_AL_moffs8
            | C::Mov_AX_moffs16
            | C::Mov_EAX_moffs32
            | C::Mov_RAX_moffs64 => AccessKind::Load,
            C::Mov_moffs8_AL
            | C::Mov_moffs16_AX
            | C::Mov_moffs32_EAX
            | C::Mov_moffs64_RAX
            | C::Mov_rm8_r8
            | C::Mov_rm16_r16
            | C::Mov_rm32_r32
            | C::Mov_rm64_r64 => AccessKind::Store,
            C::Mov_rm8_imm8 | C::Mov_rm16_imm16 | C::Mov_rm32_imm32 | C::Mov_rm64_imm32 => {
                AccessKind::StoreImmediate
            }
            _ => return None,
        };
        let register = match insn.code {
            C::Mov_moffs8_AL | C::Mov_moffs16_AX | C::Mov_moffs32_EAX | C::Mov_moffs64_RAX => {
                reg::RAX as u8
            }
            _ => match kind {
                AccessKind::PortIn(_) | AccessKind::PortOut(_) => reg::RAX as u8,
                _ => insn.dst,
            },
        };
        Some(Self {
            kind,
            register,
            size: insn.op_size,
            len: insn.len,
            events: insn.events,
            imm: insn.imm,
        })
    }

    const fn is_port(&self) -> bool {
        matches!(self.kind, AccessKind::PortIn(_) | AccessKind::PortOut(_))
    }

    /// Returns the remainder of `insn` at `rip`, which has stopped at its access; nothing if it is not such an
    /// instruction.
    #[cold]
    pub(crate) fn rest_of<B>(insn: &Insn<B>, rip: u64, is_wide: bool) -> Remainder {
        Self::of(insn).map_or(Remainder::NOTHING, |t| t.remainder(rip, is_wide))
    }

    /// Returns the remainder of this instruction at `rip`, for when the VMM has answered.
    #[inline]
    pub(crate) fn remainder(&self, rip: u64, is_wide: bool) -> Remainder {
        let target = match self.kind {
            AccessKind::PortIn(_) | AccessKind::Load => self.register,
            _ => NONE,
        };
        Remainder::new(rip, is_wide, [self.len, self.size, target], self.events)
    }

    fn port(&self, is_immediate: bool, cpu: &CpuState) -> u16 {
        if is_immediate {
            u16::from(self.imm as u8)
        } else {
            cpu.gpr[reg::RDX] as u16
        }
    }

    /// Returns the value to store. Bytes beyond the access's size are arbitrary.
    #[inline]
    fn value(&self, cpu: &CpuState) -> u64 {
        match self.kind {
            AccessKind::StoreImmediate => self.imm,
            _ if self.size == 1 => reg_read::<u8>(cpu, self.register).into(),
            _ => reg_read::<u64>(cpu, self.register),
        }
    }
}

impl<B: GuestBus> Interp<B> {
    /// Executes the instruction at RIP with the effects of [`Self::execute`]. Returns `None`, with nothing done, if
    /// that takes more: an exception, or the port bitmap of a TSS.
    ///
    /// The caller guarantees that nothing else happens at the instruction (no breakpoint, no single step, no shadow),
    /// and that its segments are flat. `gva` is the linear address of its memory operand, if it has one.
    pub fn transfer(
        &mut self,
        cpu: &mut CpuState,
        bus: &mut B,
        transfer: &Transfer,
        gva: Option<u64>,
    ) -> Option<RunStop> {
        let size = transfer.size;
        if transfer.is_port() && (cpu.cpl > cpu.iopl() || cpu.is_v86()) {
            return None;
        }
        let who = Privilege::Current;
        let fault_gva = cpu.fault_gva;
        let result = match transfer.kind {
            AccessKind::PortIn(is_immediate) => {
                let port = transfer.port(is_immediate, cpu);
                bus.port_in(cpu, port, size).map(|v| Some(v.into()))
            }
            AccessKind::PortOut(is_immediate) => {
                let port = transfer.port(is_immediate, cpu);
                let value = cut(cpu.gpr[reg::RAX], size) as u32;
                bus.port_out(cpu, port, size, value).map(|()| None)
            }
            AccessKind::Load => match bus.read_device(cpu, gva?, size, who) {
                Some(result) => result.map(Some),
                None => load(cpu, bus, gva?, size).map(Some),
            },
            AccessKind::Store | AccessKind::StoreImmediate => {
                let value = transfer.value(cpu);
                let result = match bus.write_device(cpu, gva?, size, value, who) {
                    Some(result) => result,
                    None => store(cpu, bus, gva?, size, value),
                };
                result.map(|()| None)
            }
        };
        let wide = cpu.is_64bit();
        match result {
            Ok(value) => {
                if let Some(value) = value {
                    reg_write_sized(cpu, transfer.register, size, value);
                }
                let next = cpu.rip().wrapping_add(transfer.len.into());
                cpu.set_rip(if wide { next } else { next & 0xffff_ffff });
                if cpu.retired.counts_at(cpu.cpl) {
                    cpu.retired.add(Retired::level(cpu.cpl), transfer.events);
                }
                bus.commit();
                Some(RunStop::Poll)
            }
            Err(Fault::Exit) => {
                self.remainder = transfer.remainder(cpu.rip(), wide);
                Some(RunStop::Exit)
            }
            Err(Fault::Exception(_)) => {
                // The interpreter repeats the instruction. It may raise another fault, or one that has no address.
                cpu.fault_gva = fault_gva;
                None
            }
        }
    }
}

fn cut(value: u64, size: u8) -> u64 {
    match size {
        1 => value & 0xff,
        2 => value & 0xffff,
        4 => value & 0xffff_ffff,
        _ => value,
    }
}

fn load<B: GuestBus>(cpu: &mut CpuState, bus: &mut B, gva: u64, size: u8) -> Result<u64, Fault> {
    let who = Privilege::Current;
    match size {
        1 => bus.read::<u8>(cpu, gva, who).map(u64::from),
        2 => bus.read::<u16>(cpu, gva, who).map(u64::from),
        4 => bus.read::<u32>(cpu, gva, who).map(u64::from),
        _ => bus.read::<u64>(cpu, gva, who),
    }
}

fn store<B: GuestBus>(
    cpu: &mut CpuState,
    bus: &mut B,
    gva: u64,
    size: u8,
    value: u64,
) -> Result<(), Fault> {
    let who = Privilege::Current;
    match size {
        1 => bus.write(cpu, gva, value as u8, who),
        2 => bus.write(cpu, gva, value as u16, who),
        4 => bus.write(cpu, gva, value as u32, who),
        _ => bus.write(cpu, gva, value, who),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_bus::{TestBus, at, machine};
    use x86_cpu::CodeSize;

    const OPERAND: u64 = 0xb_1237;

    /// What was returned, the CPU, the operand's memory, and the writes to ports.
    type After = (Option<RunStop>, CpuState, u64, Vec<(u16, u8, u32)>);

    /// Returns the machine's state after `run` has executed the instruction, and what `run` returned.
    fn after(
        code: &[u8],
        size: CodeSize,
        run: impl Fn(
            &mut Interp<TestBus>,
            &mut CpuState,
            &mut TestBus,
            &Insn<TestBus>,
        ) -> Option<RunStop>,
    ) -> After {
        let (mut cpu, mut bus) = machine(size == CodeSize::Bits64, 0);
        (0..16).for_each(|r| cpu.gpr[r] = 0x1122_3344_5566_7788u64.rotate_left(8 * r as u32));
        cpu.gpr[reg::RBX] = OPERAND;
        cpu.gpr[reg::RDX] = 0x3f9;
        cpu.rflags = 0x8d7;
        bus.put64(OPERAND, 0xfedc_ba98_7654_3210);
        bus.put(at::CODE, code);
        let mut interp = Interp::new();
        let insn = interp.prepare(&cpu, code).unwrap();
        assert_eq!(usize::from(insn.len), code.len());
        let stop = run(&mut interp, &mut cpu, &mut bus, &insn);
        let word = bus.get64(OPERAND);
        (stop, cpu, word, bus.out.clone())
    }

    /// Compares all that the function does with the interpreter.
    #[test]
    fn the_same_as_executed() {
        let memory_forms: [&[u8]; 17] = [
            &[0xa0, 0x37, 0x12, 0x0b, 0],
            &[0xa1, 0x37, 0x12, 0x0b, 0],
            &[0xa2, 0x37, 0x12, 0x0b, 0],
            &[0xa3, 0x37, 0x12, 0x0b, 0],
            &[0x88, 0x0b],
            &[0x88, 0x2b],
            &[0x66, 0x89, 0x0b],
            &[0x89, 0x0b],
            &[0x48, 0x89, 0x0b],
            &[0xc6, 0x03, 0x85],
            &[0x66, 0xc7, 0x03, 0x85, 0x96],
            &[0xc7, 0x03, 0x85, 0x96, 0xa7, 0xb8],
            &[0x48, 0xc7, 0x03, 0x85, 0x96, 0xa7, 0xb8],
            &[0x8a, 0x2b],
            &[0x66, 0x8b, 0x0b],
            &[0x8b, 0x0b],
            &[0x48, 0x8b, 0x0b],
        ];
        let port_forms: [&[u8]; 12] = [
            &[0xe4, 0x85],
            &[0x66, 0xe5, 0x85],
            &[0xe5, 0x85],
            &[0xec],
            &[0x66, 0xed],
            &[0xed],
            &[0xe6, 0x85],
            &[0x66, 0xe7, 0x85],
            &[0xe7, 0x85],
            &[0xee],
            &[0x66, 0xef],
            &[0xef],
        ];
        let mut compared = 0;
        for size in [CodeSize::Bits64, CodeSize::Bits32] {
            let gva = |forms: &[&[u8]], code: &&[u8]| forms.contains(code).then_some(OPERAND);
            for code in memory_forms.iter().chain(&port_forms) {
                let is_for = match code[0] {
                    0x48 => CodeSize::Bits64,
                    // In 64-bit code this address would have eight bytes.
                    0xa0..=0xa3 => CodeSize::Bits32,
                    _ => size,
                };
                if size != is_for {
                    continue;
                }
                let gva = gva(&memory_forms, code);
                let by_access = after(code, size, |i, cpu, bus, insn| {
                    i.transfer(cpu, bus, &Transfer::of(insn)?, gva)
                });
                let executed = after(code, size, |i, cpu, bus, insn| {
                    Some(i.execute(cpu, bus, insn))
                });
                assert_eq!(by_access.0, Some(RunStop::Poll), "{code:x?}");
                assert_eq!(by_access.0, executed.0, "{code:x?}");
                assert_eq!(by_access.1.gpr, executed.1.gpr, "{code:x?} {size:?}");
                assert_eq!(by_access.1.rip(), executed.1.rip(), "{code:x?}");
                assert_eq!(by_access.1.rflags, executed.1.rflags, "{code:x?}");
                assert_eq!(
                    (by_access.2, by_access.3),
                    (executed.2, executed.3),
                    "{code:x?}"
                );
                compared += 1;
            }
        }
        assert_eq!(compared, 51);
    }

    #[test]
    fn what_has_more_to_it_is_left_alone() {
        type Change = fn(&mut CpuState);
        let rows: [(&[u8], Option<u64>, Change); 6] = [
            // Instructions of other forms: ADD, MOV between registers, PUSH.
            (&[0x01, 0x0b], Some(OPERAND), |_| {}),
            (&[0x89, 0xcb], Some(OPERAND), |_| {}),
            (&[0x50], Some(OPERAND), |_| {}),
            // An unknown address, and one without memory.
            (&[0x89, 0x0b], None, |_| {}),
            (&[0x89, 0x0b], Some(1 << 40), |_| {}),
            // CPL 3 without the right to the port.
            (&[0xee], None, |cpu| cpu.cpl = 3),
        ];
        for (code, gva, change) in rows {
            let before = after(code, CodeSize::Bits64, |_, cpu, _, _| {
                change(cpu);
                None
            });
            let left = after(code, CodeSize::Bits64, |i, cpu, bus, insn| {
                change(cpu);
                i.transfer(cpu, bus, &Transfer::of(insn)?, gva)
            });
            assert_eq!(left.0, None, "{code:x?}");
            assert_eq!(left.1.gpr, before.1.gpr, "{code:x?}");
            assert_eq!(left.1.fault_gva, 0, "{code:x?}");
            assert_eq!((left.2, left.3), (before.2, before.3), "{code:x?}");
        }
    }
}
