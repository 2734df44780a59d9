//! Code generation for the same instruction set: guest code is copied where it is harmless, and rewritten where it is
//! not.
//!
//! The rooms are in the order of a block's life, and import downward only:
//!
//! * [`asm`]: the assembler;
//! * [`frame`]: what generated code shares with the run-time system, and what it asks of it;
//! * [`ir`]: decoded instructions, modes and keys, and all questions about an instruction;
//! * [`region`]: which instructions make a block or a trace;
//! * [`plan`]: which accesses share a probe;
//! * [`codegen`]: host code.
//!
//! Nothing here executes what it generates, holds memory that is executable, or knows a vCPU: host features and
//! addresses are inputs, and the result is bytes. So this crate has no `unsafe`, and its golden tests give the same code on
//! every machine. The JIT around it is `x86-jit`.

#![forbid(unsafe_code)]

pub mod asm;
pub mod codegen;
pub mod frame;
#[cfg(test)]
mod golden;
pub mod ir;
pub mod plan;
pub mod region;
