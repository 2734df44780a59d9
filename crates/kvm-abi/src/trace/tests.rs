//! Lines as they are written.

use kvm_bindings::*;

use super::*;
use crate::numbers::*;

fn argument<T>(number: u32, value: &T, when: When) -> String {
    let mut out = String::new();
    write_argument(&mut out, number, std::ptr::from_ref(value) as u64, when).unwrap();
    out
}

#[test]
fn names() {
    for (kind, number, expected) in [
        (FdKind::Vcpu, KVM_RUN, r#""kind":"vcpu","ioctl":"KVM_RUN""#),
        (FdKind::Vm, KVM_RUN, r#""kind":"vm","ioctl":"0xae80""#),
        (
            FdKind::Vm,
            KVM_GET_PIT2,
            r#""kind":"vm","ioctl":"KVM_GET_PIT2""#,
        ),
    ] {
        let mut out = String::new();
        write_call(&mut out, kind, number).unwrap();
        assert_eq!(out, expected);
    }
}

#[test]
fn arguments_before_and_after() {
    let region = kvm_userspace_memory_region {
        slot: 3,
        flags: 1,
        guest_phys_addr: 0x1000,
        memory_size: 0x2000,
        userspace_addr: 0x7000_0000_0000,
    };
    assert_eq!(
        argument(KVM_SET_USER_MEMORY_REGION, &region, When::Before),
        r#","in":{"slot":3,"flags":1,"guest_phys_addr":"0x1000","memory_size":"0x2000","userspace_addr":"0x700000000000"}"#
    );
    assert_eq!(
        argument(KVM_SET_USER_MEMORY_REGION, &region, When::After),
        ""
    );
    let state = kvm_mp_state { mp_state: 3 };
    assert_eq!(argument(KVM_GET_MP_STATE, &state, When::Before), "");
    assert_eq!(
        argument(KVM_GET_MP_STATE, &state, When::After),
        r#","out":{"mp_state":3}"#
    );
    let mut sregs = kvm_sregs::default();
    sregs.cs.selector = 0x10;
    sregs.gdt.limit = 0x7f;
    let text = argument(KVM_GET_SREGS, &sregs, When::After);
    assert!(text.contains(r#""selector":16,"#), "{text}");
    assert!(
        text.contains(r#""gdt":{"base":"0x0","limit":127}"#),
        "{text}"
    );
}

#[test]
fn lists() {
    let msrs = [2u64, 0x10, 0x1234, 0x1b, 0xfee0_0900];
    assert_eq!(
        argument(KVM_SET_MSRS, &msrs, When::Before),
        r#","in":{"count":2,"entries":[{"index":16,"data":"0x1234"},{"index":27,"data":"0xfee00900"}]}"#
    );
    let list = [2u32, 0x10, 0x1b];
    assert_eq!(
        argument(KVM_GET_MSR_INDEX_LIST, &list, When::Before),
        r#","in":{"count":2}"#
    );
    assert_eq!(
        argument(KVM_GET_MSR_INDEX_LIST, &list, When::After),
        r#","out":{"count":2,"entries":[{"index":16},{"index":27}]}"#
    );
}

#[test]
fn bad_pointers_and_numbers() {
    let mut out = String::new();
    write_argument(&mut out, KVM_SET_MSRS, 8, When::Before).unwrap();
    assert_eq!(out, r#","in":null"#);
    out.clear();
    write_argument(&mut out, KVM_SET_MP_STATE, 8, When::Before).unwrap();
    assert_eq!(out, r#","in":{"mp_state":null}"#);
    out.clear();
    write_argument(&mut out, KVM_CREATE_VCPU, 2, When::Before).unwrap();
    assert_eq!(out, r#","in":2"#);
}

#[test]
fn exits() {
    let mut run = vec![0u64; 512];
    let at = core::mem::offset_of!(kvm_run, exit_reason) / 8;
    run[at] = u64::from(KVM_EXIT_MMIO);
    let details = core::mem::offset_of!(kvm_run, __bindgen_anon_1) / 8;
    run[details] = 0xfee0_0000;
    run[details + 1] = 0x1234;
    run[details + 2] = 2 | 1 << 32;
    let mut out = String::new();
    write_exit(&mut out, run.as_ptr() as u64).unwrap();
    assert_eq!(
        out,
        r#","exit":{"reason":"MMIO","gpa":"0xfee00000","len":2,"is_write":true,"data":"3412"}"#
    );
    run[at] = u64::from(KVM_EXIT_MEMORY_FAULT);
    run[details..details + 3].copy_from_slice(&[0, 0x8000, 0x1000]);
    out.clear();
    write_exit(&mut out, run.as_ptr() as u64).unwrap();
    assert_eq!(
        out,
        r#","exit":{"reason":"MEMORY_FAULT","flags":0,"gpa":"0x8000","size":4096}"#
    );
}
