//! [`EngineOptions`]: how the vCPUs of a VM execute, for whoever makes the VM to choose.

pub use guest_memory::Harvest;
pub use mmu::Policy;
pub use x86_jit::Profiler;

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
    /// How dirty pages are harvested.
    pub harvest: Harvest,
    /// A profiler that wants names for translated code.
    pub profiler: Option<Profiler>,
    /// Who is told what has no other way out.
    pub messages: Messages,
    /// KVM_SET_NR_MMU_PAGES of a VMM that does not ask for it.
    pub mmu_pages: Option<u32>,
}

/// Who is told of what the VMM has not asked for: differences in lock-step, a profiler's file that cannot be written. Nobody, by default.
#[derive(Clone, Copy, Debug)]
pub struct Messages(pub fn(&str));

impl Default for Messages {
    fn default() -> Self {
        Self(|_| {})
    }
}

impl PartialEq for Messages {
    /// Who is told makes no difference to execution.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Messages {}
