//! [`Program`]: elements of random code, some of which can be left out.

use iced_x86::{BlockEncoder, BlockEncoderOptions, Code, Instruction, InstructionBlock, OpKind};
use x86_cpu::CpuState;

use super::machine::{CODE, CODE_PAGES, USER, base};

/// The first of the numbers that stand for addresses of instructions before these are known.
const LABEL: u64 = 0x7700_0000;

/// The target of a branch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// The element of this number, or the next one that is not left out.
    Element(usize),
    /// The function of this number.
    Function(usize),
}

/// An operand that is filled in once addresses are known.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fix {
    /// A direct branch.
    Branch(Target),
    /// LEA with RIP.
    Address(Target),
    /// MOV of a 64-bit immediate: the address of the last four bytes of an element's first instruction, in one of the
    /// two mappings.
    Immediate { element: usize, user: bool },
}

impl Fix {
    /// Returns true if a register gets an address.
    pub(super) const fn is_address(&self) -> bool {
        matches!(self, Self::Address(_) | Self::Immediate { .. })
    }
}

/// Instructions that belong together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Element {
    pub(crate) code: Vec<Instruction>,
    pub(crate) fixes: Vec<(usize, Fix)>,
    /// True if the element is left out.
    pub(crate) off: bool,
}

impl Element {
    pub(crate) fn push(&mut self, i: Instruction) {
        self.code.push(i);
    }
    pub(crate) fn push_fixed(&mut self, i: Instruction, fix: Fix) {
        self.fixes.push((self.code.len(), fix));
        self.code.push(i);
    }
}

/// A random program.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) seed: u64,
    /// True for 32-bit code.
    pub(crate) narrow: bool,
    pub(crate) elements: Vec<Element>,
    pub(crate) functions: Vec<Element>,
    /// gpas of the main code and of the functions.
    pub(crate) at: [u64; 2],
    /// Start states, which are used in turn. Memory is reset before each, code is kept.
    pub(crate) starts: Vec<CpuState>,
    pub(crate) data: Vec<(u64, Vec<u8>)>,
    pub(crate) weather: super::machine::Weather,
}

impl Program {
    /// Returns the gva of gpa 0 where the program runs.
    pub(crate) fn base(&self) -> u64 {
        base(self.starts.first().map_or(3, |c| c.cpl), self.narrow)
    }

    /// Returns the width of the code in bits.
    pub(crate) const fn bits(&self) -> u32 {
        if self.narrow { 32 } else { 64 }
    }

    /// Returns the number of element `n`, or of the next one that is not left out.
    fn kept(&self, n: usize) -> usize {
        let n = (n..self.elements.len()).find(|&n| !self.elements[n].off);
        n.unwrap_or(self.elements.len() - 1)
    }

    fn label(&self, t: Target) -> u64 {
        match t {
            Target::Element(n) => LABEL + ((self.kept(n) as u64) << 8),
            Target::Function(n) => LABEL + (((0x1000 + n) as u64) << 8),
        }
    }

    fn list(&self, elements: &[Element], first: u64) -> Vec<Instruction> {
        let mut list = Vec::new();
        for (n, e) in elements.iter().enumerate().filter(|(_, e)| !e.off) {
            for (k, i) in e.code.iter().enumerate() {
                let mut i = *i;
                i.set_ip(LABEL + ((first + n as u64) << 8) + k as u64);
                for (_, fix) in e.fixes.iter().filter(|f| f.0 == k) {
                    match *fix {
                        Fix::Branch(t) if self.narrow => {
                            i.set_near_branch32(self.label(t) as u32);
                        }
                        Fix::Branch(t) => i.set_near_branch64(self.label(t)),
                        Fix::Address(_) if self.narrow => {}
                        Fix::Address(t) => i.set_memory_displacement64(self.label(t)),
                        Fix::Immediate { .. } => {}
                    }
                }
                list.push(i);
            }
        }
        list
    }

    /// Returns the program's bytes with their gpas. `None` if something cannot be encoded.
    pub(crate) fn assemble(&self) -> Option<[(u64, Vec<u8>); 2]> {
        let lists = [
            self.list(&self.elements, 0),
            self.list(&self.functions, 0x1000),
        ];
        let start = self.base();
        let blocks = [0, 1].map(|n| InstructionBlock::new(&lists[n], start + self.at[n]));
        let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let results = BlockEncoder::encode_slice(self.bits(), &blocks, options).ok()?;
        let [main, functions] = <[_; 2]>::try_from(results).ok()?;
        let mut bytes = main.code_buffer;
        let offsets = main.new_instruction_offsets;
        let index = |elements: &[Element], element: usize, k: usize| {
            let before = elements[..element].iter().filter(|e| !e.off);
            before.map(|e| e.code.len()).sum::<usize>() + k
        };
        for (n, e) in self.elements.iter().enumerate().filter(|(_, e)| !e.off) {
            for (k, fix) in e.fixes.iter().filter(|f| f.1.is_address()) {
                let gva = match *fix {
                    Fix::Immediate { element, user } => {
                        let end = *offsets.get(index(&self.elements, element, 0) + 1)?;
                        let gpa = self.at[0] + u64::from(end) - 4;
                        gpa + if user { USER } else { base(0, self.narrow) }
                    }
                    Fix::Address(t) if self.narrow => {
                        let (at, offset) = match t {
                            Target::Element(n) => {
                                let n = self.kept(n);
                                (self.at[0], offsets.get(index(&self.elements, n, 0)))
                            }
                            Target::Function(n) => {
                                let offsets = &functions.new_instruction_offsets;
                                (self.at[1], offsets.get(index(&self.functions, n, 0)))
                            }
                        };
                        self.base() + at + u64::from(*offset?)
                    }
                    Fix::Address(_) | Fix::Branch(_) => continue,
                };
                let from = *offsets.get(index(&self.elements, n, *k))? as usize;
                // MOV has an immediate of the size of addresses.
                let (opcode, len) = if self.narrow { (1, 4) } else { (2, 8) };
                bytes
                    .get_mut(from + opcode..from + opcode + len)?
                    .copy_from_slice(&gva.to_le_bytes()[..len]);
            }
        }
        let parts = [(self.at[0], bytes), (self.at[1], functions.code_buffer)];
        parts
            .iter()
            .all(|(at, b)| at + b.len() as u64 <= CODE + CODE_PAGES * 0x1000)
            .then_some(parts)
    }
}

/// Returns a branch whose target is filled in later.
pub(crate) fn branch(code: Code) -> Instruction {
    let mut i = Instruction::default();
    i.set_code(code);
    i.set_op0_kind(OpKind::NearBranch64);
    i
}
