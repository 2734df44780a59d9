//! Tests of slots, accesses and page state.
