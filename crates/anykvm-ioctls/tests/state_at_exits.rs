//! What a VMM sees of the vCPU at an exit, besides what the exit says.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod guest;

use anykvm_ioctls::VcpuExit;
use guest::Guest;
use kvm_bindings::*;

/// An instruction that waits for the VMM has not been executed: the shadow of the one before it is still there.
#[test]
fn interrupt_shadows() {
    const STI: u8 = KVM_X86_SHADOW_INT_STI as u8;
    const MOV_SS: u8 = KVM_X86_SHADOW_INT_MOV_SS as u8;
    let cases: [(&str, &[u8], u8); 5] = [
        ("sti", &[0xfa, 0xfb], STI),
        ("sti again", &[0xfb, 0x90, 0xfb], 0),
        ("mov ss, ax", &[0xfb, 0x90, 0x8e, 0xd0], MOV_SS),
        ("push ss; pop ss", &[0xfb, 0x16, 0x17], MOV_SS),
        ("sti; nop", &[0xfa, 0xfb, 0x90], 0),
    ];
    for (name, makes, shadow) in cases {
        // mov ax, ss; then what makes the shadow; out 0x80, al; out 0x81, al; hlt
        let end = [0xe6, 0x80, 0xe6, 0x81, 0xf4];
        let code = [&[0x8c, 0xd0], makes, &end].concat();
        let mut g = Guest::new(&code, false);
        // Translated code, too, once it has been executed before.
        for turn in 0..3 {
            let mut regs = g.vcpu.get_regs().unwrap();
            (regs.rip, regs.rsp) = (guest::RAM, 0x4000);
            g.vcpu.set_regs(&regs).unwrap();
            for (port, shadow) in [(0x80, shadow), (0x81, 0)] {
                let exit = g.vcpu.run().unwrap();
                assert!(
                    matches!(exit, VcpuExit::IoOut(p, _) if p == port),
                    "{exit:?}"
                );
                let ready = g.vcpu.get_kvm_run().ready_for_interrupt_injection;
                let events = g.vcpu.get_vcpu_events().unwrap();
                let seen = (ready, events.interrupt.shadow);
                assert_eq!(seen, (u8::from(shadow == 0), shadow), "{name}, {turn}");
            }
            assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
            assert_eq!(g.vcpu.get_kvm_run().ready_for_interrupt_injection, 1);
        }
    }
}

/// The registers of the VMM's thread do not have what the guest has in its own.
#[test]
fn mmx_registers() {
    const VALUE: u64 = 0x1234_5678;
    // mov eax, VALUE; movd mm0, eax; out 0x80, al; movd ebx, mm0; emms; hlt
    let code = [
        0x66, 0xb8, 0x78, 0x56, 0x34, 0x12, 0x0f, 0x6e, 0xc0, 0xe6, 0x80, 0x66, 0x31, 0xdb, 0x0f,
        0x7e, 0xc3, 0x0f, 0x77, 0xf4,
    ];
    let mut g = Guest::new(&code, false);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
    let host: u64;
    // SAFETY: reads a register, and leaves the registers empty, as they are between functions.
    unsafe { core::arch::asm!("movq {}, mm0", "emms", out(reg) host) };
    assert_ne!(host, VALUE);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(g.vcpu.get_regs().unwrap().rbx, VALUE);
}

/// A new vCPU's image, and the components that an image says are in use.
#[test]
fn fp_state() {
    let mut g = Guest::new(&[0xf4], false);
    let in_use = |g: &Guest| {
        let image = g.vcpu.get_xsave().unwrap().region;
        u64::from(image[128]) | u64::from(image[129]) << 32
    };
    let new = g.vcpu.get_fpu().unwrap();
    assert_eq!((new.fcw, new.mxcsr, in_use(&g)), (0x37f, 0x1f80, 0));
    let mut fpu = new;
    fpu.xmm[3][0] = 1;
    g.vcpu.set_fpu(&fpu).unwrap();
    assert_eq!(in_use(&g), 2);
    fpu = new;
    fpu.mxcsr = 0x1f00;
    g.vcpu.set_fpu(&fpu).unwrap();
    assert_eq!(in_use(&g), 2);
    fpu = new;
    fpu.fcw = 0x27f;
    g.vcpu.set_fpu(&fpu).unwrap();
    assert_eq!(in_use(&g), 1);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(g.vcpu.get_fpu().unwrap(), fpu);
}
