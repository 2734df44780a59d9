//! [`EngineOptions`]: how the vCPUs of a VM execute, for whoever makes the VM to choose.

pub use mmu::Policy;

/// What executes a vCPU's instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// The translator; the interpreter where the host allows no generated code.
    #[default]
    Translator,
    /// The interpreter alone.
    Interpreter,
    /// The translator, with each stretch of code compared with the interpreter.
    Lockstep {
        /// An error is put into translated code, which has to be found.
        is_planted: bool,
    },
}

/// How the vCPUs of a VM execute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineOptions {
    /// What executes instructions.
    pub engine: Engine,
    /// Bytes of translated code of a vCPU, if not as many as usual.
    pub code_cache: Option<usize>,
    /// All translated code is dropped at random, once in so many blocks looked for.
    pub random_flushes: Option<u64>,
    /// How translations of addresses are kept when CR3 changes.
    pub translations: Policy,
    /// KVM_SET_NR_MMU_PAGES of a VMM that does not ask for it.
    pub mmu_pages: Option<u32>,
}
