//! Executes one harmless instruction on the host CPU with a given register file and memory operand.
