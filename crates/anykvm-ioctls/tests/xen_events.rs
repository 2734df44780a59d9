//! Xen's shared pages, event channels, timers and run states (KVM API document, KVM_XEN_HVM_SET_ATTR; Xen's public headers).

#![allow(clippy::unwrap_used, reason = "tests")]

mod engines;
mod guest;
mod long_mode;

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anykvm_ioctls::VcpuFd;
use guest::{IRR, enable_lapic, ioctl, lapic_bit, next_port, set_msr};
use iced_x86::{IcedError, code_asm::*};
use kvm_abi::numbers::*;
use kvm_bindings::*;
use long_mode::Machine;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MSR: u32 = 0x4000_0200;
const CODE: u64 = 0x5000;
const HANDLER: u64 = 0x5800;
const RESULTS: u64 = 0x6000;
const ARGUMENTS: u64 = 0x7000;
/// The page that the guest shares; pending bits and mask of a 64-bit guest.
const SHARED: u64 = 0x9000;
const PENDING: u64 = SHARED + 0x800;
const MASK: u64 = SHARED + 0xa00;
/// `struct vcpu_info`, and its selector of words.
const INFO: u64 = 0xa040;
const SELECTOR: u64 = INFO + 8;
const TIME: u64 = 0xb010;
const RUNSTATE: u64 = 0xc000 - 20;
const VECTOR: u8 = 0x41;
/// KVM_IRQ_ROUTING_XEN_EVTCHN_PRIO_2LEVEL.
const PRIORITY: u32 = u32::MAX;
const NOWHERE: u64 = u64::MAX;

type VmUnion = kvm_xen_hvm_attr__bindgen_ty_1;
type VcpuUnion = kvm_xen_vcpu_attr__bindgen_ty_1;
type Channel = kvm_xen_hvm_attr__bindgen_ty_1__bindgen_ty_2;
type Times = kvm_xen_vcpu_attr__bindgen_ty_1__bindgen_ty_1;
type Timer = kvm_xen_vcpu_attr__bindgen_ty_1__bindgen_ty_2;

/// Sets an attribute of the VM.
fn set(m: &Machine, kind: u32, store: impl FnOnce(&mut VmUnion)) -> Result<i32, i32> {
    let mut attr = kvm_xen_hvm_attr {
        type_: kind as u16,
        pad: [0; 3],
        u: VmUnion { pad: [0; 8] },
    };
    store(&mut attr.u);
    ioctl(&m.vm, KVM_XEN_HVM_SET_ATTR, &mut attr)
}

/// Gets an attribute of the VM, all of its bytes as words.
fn get(m: &Machine, kind: u32) -> Result<u64, i32> {
    let mut attr = kvm_xen_hvm_attr {
        type_: kind as u16,
        pad: [0; 3],
        u: VmUnion { pad: [0; 8] },
    };
    ioctl(&m.vm, KVM_XEN_HVM_GET_ATTR, &mut attr)?;
    // SAFETY: any bytes are integers.
    Ok(unsafe { attr.u.pad[0] })
}

fn set_vcpu(vcpu: &VcpuFd, kind: u32, store: impl FnOnce(&mut VcpuUnion)) -> Result<i32, i32> {
    let mut attr = kvm_xen_vcpu_attr {
        type_: kind as u16,
        pad: [0; 3],
        u: VcpuUnion { pad: [0; 8] },
    };
    store(&mut attr.u);
    ioctl(vcpu, KVM_XEN_VCPU_SET_ATTR, &mut attr)
}

fn get_vcpu(vcpu: &VcpuFd, kind: u32) -> Result<VcpuUnion, i32> {
    let mut attr = kvm_xen_vcpu_attr {
        type_: kind as u16,
        pad: [0; 3],
        u: VcpuUnion { pad: [0; 8] },
    };
    ioctl(vcpu, KVM_XEN_VCPU_GET_ATTR, &mut attr)?;
    Ok(attr.u)
}

fn times(vcpu: &VcpuFd) -> Times {
    let data = get_vcpu(vcpu, KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_DATA).unwrap();
    // SAFETY: any bytes are integers.
    unsafe { data.runstate }
}

fn sum(t: &Times) -> u64 {
    t.time_running
        .wrapping_add(t.time_runnable)
        .wrapping_add(t.time_blocked)
        .wrapping_add(t.time_offline)
}

fn send(m: &Machine, vcpu: u32, port: u32) -> Result<i32, i32> {
    let mut event = kvm_irq_routing_xen_evtchn {
        port,
        vcpu,
        priority: PRIORITY,
    };
    ioctl(&m.vm, KVM_XEN_HVM_EVTCHN_SEND, &mut event)
}

fn set_timer(vcpu: &VcpuFd, port: u32, expires_ns: u64) {
    let timer = Timer {
        port,
        priority: PRIORITY,
        expires_ns,
    };
    set_vcpu(vcpu, KVM_XEN_VCPU_ATTR_TYPE_TIMER, |u| u.timer = timer).unwrap();
}

/// When the timer fires; 0: it does not run.
fn expires_ns(vcpu: &VcpuFd) -> u64 {
    let timer = get_vcpu(vcpu, KVM_XEN_VCPU_ATTR_TYPE_TIMER).unwrap();
    // SAFETY: any bytes are integers.
    unsafe { timer.timer.expires_ns }
}

fn word(m: &Machine, at: u64) -> u64 {
    u64::from_le_bytes(m.read(at))
}

/// Sets the vCPU's `struct vcpu_info`.
fn set_info(vcpu: &VcpuFd, gpa: u64) -> Result<i32, i32> {
    set_vcpu(vcpu, KVM_XEN_VCPU_ATTR_TYPE_VCPU_INFO, |u| u.gpa = gpa)
}

/// A machine of Xen's with chips and a shared page, and a vCPU whose LAPIC is on and whose upcalls come to [`HANDLER`].
fn machine() -> (Machine, VcpuFd) {
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    let mut config = kvm_xen_hvm_config {
        flags: KVM_XEN_HVM_CONFIG_INTERCEPT_HCALL | KVM_XEN_HVM_CONFIG_EVTCHN_SEND,
        msr: MSR,
        ..Default::default()
    };
    ioctl(&m.vm, KVM_XEN_HVM_CONFIG, &mut config).unwrap();
    let vcpu = m.vcpu(0, CODE);
    enable_lapic(&vcpu);
    m.handle(&vcpu, VECTOR, [0xe000, 0xf000], HANDLER);
    // Says that it knows of the events, and tells the VMM.
    m.load(HANDLER, |a| {
        a.mov(byte_ptr(INFO), 0)?;
        a.mov(qword_ptr(SELECTOR), 0)?;
        a.out(0x80, al)?;
        a.iretq()
    });
    m.load(CODE, |a| {
        let mut again = a.create_label();
        a.sti()?;
        a.set_label(&mut again)?;
        a.hlt()?;
        a.out(0x81, al)?;
        a.jmp(again)
    });
    set(&m, KVM_XEN_ATTR_TYPE_LONG_MODE, |u| u.long_mode = 1).unwrap();
    set(&m, KVM_XEN_ATTR_TYPE_UPCALL_VECTOR, |u| u.vector = VECTOR).unwrap();
    set(&m, KVM_XEN_ATTR_TYPE_SHARED_INFO, |u| {
        u.shared_info.gfn = SHARED >> 12;
    })
    .unwrap();
    set_info(&vcpu, INFO).unwrap();
    (m, vcpu)
}

fn channel(send_port: u32, kind: u32, port: u32, flags: u32) -> Channel {
    let mut channel = Channel {
        send_port,
        type_: kind,
        flags,
        deliver: kvm_xen_hvm_attr__bindgen_ty_1__bindgen_ty_2__bindgen_ty_1 { padding: [0; 4] },
    };
    (channel.deliver.port.port, channel.deliver.port.priority) = (port, PRIORITY);
    channel
}

fn set_channel(m: &Machine, channel: Channel) -> Result<i32, i32> {
    set(m, KVM_XEN_ATTR_TYPE_EVTCHN, |u| u.evtchn = channel)
}

const INTERDOMAIN: u32 = 2;
const IPI: u32 = 5;

#[test]
fn an_upcall_tells_of_events() {
    let (m, mut vcpu) = machine();
    send(&m, 0, 70).unwrap();
    assert_eq!(
        [word(&m, PENDING + 8), word(&m, SELECTOR), word(&m, INFO)],
        [1 << 6, 2, 1]
    );
    assert_eq!([next_port(&mut vcpu), next_port(&mut vcpu)], [0x80, 0x81]);
    assert_eq!([word(&m, SELECTOR), word(&m, INFO)], [0, 0]);
    // One that is pending still, and one that is masked, are not told. Neither is an upcall while the guest has none.
    send(&m, 0, 70).unwrap();
    m.write(MASK, &[1 << 3]);
    send(&m, 0, 3).unwrap();
    assert_eq!([word(&m, PENDING), word(&m, SELECTOR)], [8, 0]);
    // By a GSI.
    let mut routing = KvmIrqRouting::new(1).unwrap();
    let entry = &mut routing.as_mut_slice()[0];
    (entry.gsi, entry.type_) = (40, KVM_IRQ_ROUTING_XEN_EVTCHN);
    entry.u.xen_evtchn = kvm_irq_routing_xen_evtchn {
        port: 4095,
        vcpu: 0,
        priority: PRIORITY,
    };
    m.vm.set_gsi_routing(&routing).unwrap();
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    m.vm.register_irqfd(&event, 40).unwrap();
    event.write(1).unwrap();
    assert_eq!(next_port(&mut vcpu), 0x80);
    assert_eq!(word(&m, PENDING + 504), 1 << 63);
    // The VMM may also tell by itself.
    m.write(INFO, &[1]);
    assert_eq!(next_port(&mut vcpu), 0x80);
    // By the vCPU's own LAPIC, and none by the common vector.
    set(&m, KVM_XEN_ATTR_TYPE_UPCALL_VECTOR, |u| u.vector = 0).unwrap();
    set_vcpu(&vcpu, KVM_XEN_VCPU_ATTR_TYPE_UPCALL_VECTOR, |u| {
        u.vector = VECTOR;
    })
    .unwrap();
    send(&m, 0, 5).unwrap();
    assert!(lapic_bit(&vcpu, IRR, VECTOR));
    assert_eq!(next_port(&mut vcpu), 0x80);
}

#[test]
fn events_wait_for_the_structure_that_tells_them() {
    let (m, mut vcpu) = machine();
    set_info(&vcpu, NOWHERE).unwrap();
    send(&m, 0, 70).unwrap();
    assert_eq!([word(&m, PENDING + 8), word(&m, SELECTOR)], [1 << 6, 0]);
    set_info(&vcpu, INFO).unwrap();
    assert_eq!([next_port(&mut vcpu), next_port(&mut vcpu)], [0x80, 0x81]);
    // Of a 32-bit guest all is elsewhere, and there are fewer ports.
    set(&m, KVM_XEN_ATTR_TYPE_LONG_MODE, |u| u.long_mode = 0).unwrap();
    send(&m, 0, 33).unwrap();
    assert_eq!([word(&m, PENDING), word(&m, INFO)], [2 << 32, 2 << 32 | 1]);
    assert_eq!(send(&m, 0, 1024), Err(libc::EINVAL));
    assert_ne!(word(&m, SHARED + 0x900), 0, "the wall clock");
}

/// Calls with these arguments, and stores the result in the next of [`RESULTS`].
fn call(a: &mut CodeAssembler, nr: u32, args: [u64; 3]) -> Result<(), IcedError> {
    for (r, arg) in [rdi, rsi, rdx].into_iter().zip(args) {
        a.mov(r, arg)?;
    }
    a.mov(eax, nr)?;
    a.vmcall()?;
    a.mov(qword_ptr(rbx), rax)?;
    a.add(rbx, 8)
}

const NS: u64 = 1_000_000;

fn calls(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rbx, RESULTS)?;
    // XENVER_version
    call(a, 17, [0, 0, 0])?;
    // EVTCHNOP_send to a port of its own, and to an eventfd.
    call(a, 32, [4, ARGUMENTS, 0])?;
    call(a, 32, [4, ARGUMENTS + 4, 0])?;
    call(a, 32, [4, 1 << 40, 0])?;
    // SCHEDOP_yield
    call(a, 29, [0, 0, 0])?;
    // SCHEDOP_poll for a port that is pending, for one that stays away, for too many, and for one that is none.
    for n in 1..5 {
        call(a, 29, [3, ARGUMENTS + 0x20 * n, 0])?;
    }
    // VCPUOP_set_singleshot_timer of this and of another vCPU, VCPUOP_stop_singleshot_timer.
    call(a, 24, [8, 7, ARGUMENTS + 0x100])?;
    call(a, 24, [8, 1, ARGUMENTS + 0x100])?;
    call(a, 24, [9, 7, 0])?;
    // __HYPERVISOR_set_timer_op, with a time that cannot be meant; and the wait for it.
    call(a, 15, [u64::MAX, 0, 0])?;
    call(a, 29, [3, ARGUMENTS + 0x80 + 0x20, 0])?;
    a.out(0x82, al)?;
    a.hlt()
}

#[test]
fn hypercalls_that_the_vmm_does_not_see() {
    let (m, mut vcpu) = machine();
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    set(&m, KVM_XEN_ATTR_TYPE_XEN_VERSION, |u| {
        u.xen_version = 0x4_000a;
    })
    .unwrap();
    set_vcpu(&vcpu, KVM_XEN_VCPU_ATTR_TYPE_VCPU_ID, |u| u.vcpu_id = 7).unwrap();
    set_timer(&vcpu, 9, 0);
    set_channel(&m, channel(21, INTERDOMAIN, 22, 0)).unwrap();
    let mut eventfd = channel(23, INTERDOMAIN, 0, 0);
    eventfd.deliver.eventfd.fd = event.as_raw_fd();
    set_channel(&m, eventfd).unwrap();
    m.load(CODE, calls);
    let store = |at, words: &[u64]| {
        for (at, word) in (at..).step_by(8).zip(words) {
            m.write(at, &word.to_le_bytes());
        }
    };
    store(ARGUMENTS, &[23 << 32 | 21]);
    // A pointer to ports, their number, and how long to wait.
    store(ARGUMENTS + 0x20, &[ARGUMENTS + 0x200, 2, 0]);
    store(ARGUMENTS + 0x40, &[ARGUMENTS + 0x208, 1, 20 * NS]);
    store(ARGUMENTS + 0x60, &[ARGUMENTS + 0x200, 129, 0]);
    store(ARGUMENTS + 0x80, &[ARGUMENTS + 0x210, 1, 0]);
    store(ARGUMENTS + 0xa0, &[ARGUMENTS + 0x218, 1, 0]);
    store(ARGUMENTS + 0x100, &[u64::MAX / 2, 0]);
    store(ARGUMENTS + 0x200, &[22 << 32 | 50, 50, 4096, 9]);
    let begin = Instant::now();
    assert_eq!(next_port(&mut vcpu), 0x82);
    let took = begin.elapsed();
    let [einval, efault] = [22u64, 14].map(u64::wrapping_neg);
    let results: Vec<u64> = (0..14).map(|n| word(&m, RESULTS + 8 * n)).collect();
    let want = [
        0x4_000a, 0, 0, efault, 0, 0, 0, einval, einval, 0, einval, 0, 0, 0,
    ];
    assert_eq!(results, want);
    // 20 ms for the port that stays away, 100 ms in place of the impossible time.
    assert!(took >= Duration::from_millis(120), "{took:?}");
    assert_eq!(event.read().unwrap(), 1);
    assert_eq!(word(&m, PENDING), 1 << 22 | 1 << 9);
    assert_eq!(expires_ns(&vcpu), 0);
}

#[test]
fn a_wait_ends_with_an_event_or_an_interrupt() {
    let (m, mut vcpu) = machine();
    m.load(CODE, |a| {
        a.mov(rbx, RESULTS)?;
        // For a masked port, without a limit; and for another one, which an interrupt ends.
        call(a, 29, [3, ARGUMENTS, 0])?;
        a.out(0x83, al)?;
        a.sti()?;
        call(a, 29, [3, ARGUMENTS + 0x20, 0])?;
        a.out(0x84, al)?;
        a.hlt()
    });
    for (at, word) in [
        (ARGUMENTS, ARGUMENTS + 0x200),
        (ARGUMENTS + 8, 1),
        (ARGUMENTS + 0x20, ARGUMENTS + 0x208),
        (ARGUMENTS + 0x28, 1),
        (ARGUMENTS + 0x200, 3),
        (ARGUMENTS + 0x208, 50),
        (MASK, 1 << 3),
    ] {
        m.write(at, &word.to_le_bytes());
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            send(&m, 0, 3).unwrap();
        });
        assert_eq!(next_port(&mut vcpu), 0x83);
    });
    assert_eq!(word(&m, SELECTOR), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            send(&m, 0, 4).unwrap();
        });
        assert_eq!([next_port(&mut vcpu), next_port(&mut vcpu)], [0x80, 0x84]);
    });
}

#[test]
fn a_timer_raises_its_event() {
    let (m, mut vcpu) = machine();
    let now = || m.vm.get_clock().unwrap().clock;
    let later = now() + 20 * NS;
    set_timer(&vcpu, 13, later);
    assert_eq!(expires_ns(&vcpu), later);
    assert_eq!(next_port(&mut vcpu), 0x80);
    assert!(now() >= later);
    assert_eq!((word(&m, PENDING), expires_ns(&vcpu)), (1 << 13, 0));
    assert_eq!(next_port(&mut vcpu), 0x81);
    // A time that has passed, of a vCPU that does not run: whoever saves it finds the event.
    m.write(PENDING, &[0; 8]);
    set_timer(&vcpu, 13, 1);
    assert_eq!((expires_ns(&vcpu), word(&m, PENDING)), (0, 1 << 13));
    assert_eq!(next_port(&mut vcpu), 0x80);
}

#[test]
fn run_states_and_clocks() {
    let (m, mut vcpu) = machine();
    let address = |gpa| set_vcpu(&vcpu, KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADDR, |u| u.gpa = gpa);
    let is_set = || get_vcpu(&vcpu, KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADDR).map(drop);
    assert_eq!(is_set(), Err(libc::ENOENT));
    address(RUNSTATE).unwrap();
    is_set().unwrap();
    set(&m, KVM_XEN_ATTR_TYPE_RUNSTATE_UPDATE_FLAG, |u| {
        u.runstate_update_flag = 1;
    })
    .unwrap();
    set_vcpu(&vcpu, KVM_XEN_VCPU_ATTR_TYPE_VCPU_TIME_INFO, |u| {
        u.gpa = TIME;
    })
    .unwrap();
    send(&m, 0, 1).unwrap();
    assert_eq!(next_port(&mut vcpu), 0x80);
    let set_times = |vcpu: &VcpuFd, kind, times| set_vcpu(vcpu, kind, |u| u.runstate = times);
    let current = KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_CURRENT;
    let state = |state| Times {
        state,
        ..Default::default()
    };
    assert_eq!(set_times(&vcpu, current, state(4)), Err(libc::EINVAL));
    set_times(&vcpu, current, state(2)).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(next_port(&mut vcpu), 0x81);
    // What the guest sees is in two pages, and its own sum.
    let seen = times(&vcpu);
    assert_eq!(seen.state, 0);
    assert!(seen.time_blocked >= 2 * NS, "{seen:?}");
    assert_eq!(seen.state_entry_time, sum(&seen));
    let guests: Vec<u64> = (0..6).map(|n| word(&m, RUNSTATE + 8 * n)).collect();
    let Times {
        time_running,
        time_runnable,
        ..
    } = seen;
    let want = [
        0,
        sum(&seen),
        time_running,
        time_runnable,
        seen.time_blocked,
        seen.time_offline,
    ];
    assert_eq!(guests, want);
    for at in [INFO + 32, TIME] {
        let version = u32::from_le_bytes(m.read(at));
        assert!(version != 0 && version & 1 == 0, "{at:#x}");
        assert_eq!(m.read::<1>(at + 29), [1], "stable");
    }
    // What is restored has to add up, and not to be in the future.
    let data = KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_DATA;
    let mut restored = Times {
        state: 1,
        state_entry_time: 30,
        time_blocked: 10,
        time_offline: 20,
        ..Default::default()
    };
    set_times(&vcpu, data, restored).unwrap();
    assert_eq!(times(&vcpu), restored);
    restored.time_offline += 1;
    assert_eq!(set_times(&vcpu, data, restored), Err(libc::EINVAL));
    let future = Times {
        state_entry_time: 1 << 60,
        time_running: 1 << 60,
        ..Default::default()
    };
    assert_eq!(set_times(&vcpu, data, future), Err(libc::EINVAL));
    let moved = Times {
        state: u64::MAX,
        time_blocked: 5,
        time_offline: 5u64.wrapping_neg(),
        ..Default::default()
    };
    let adjust = KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADJUST;
    set_times(&vcpu, adjust, moved).unwrap();
    let seen = times(&vcpu);
    assert_eq!((seen.time_blocked, seen.time_offline), (15, 15));
    assert_eq!(word(&m, RUNSTATE + 40), 15);
    assert!(matches!(get_vcpu(&vcpu, adjust), Err(libc::EINVAL)));
    // The clock of Xen's guests need not be stable.
    let mut config = kvm_xen_hvm_config {
        flags: KVM_XEN_HVM_CONFIG_INTERCEPT_HCALL | KVM_XEN_HVM_CONFIG_PVCLOCK_TSC_UNSTABLE,
        msr: MSR,
        ..Default::default()
    };
    ioctl(&m.vm, KVM_XEN_HVM_CONFIG, &mut config).unwrap();
    send(&m, 0, 2).unwrap();
    assert_eq!(next_port(&mut vcpu), 0x80);
    assert_eq!(m.read::<1>(TIME + 29), [0]);
}

#[test]
fn attributes_come_back_and_bad_ones_are_refused() {
    let (m, vcpu) = machine();
    assert_eq!(get(&m, KVM_XEN_ATTR_TYPE_LONG_MODE), Ok(1));
    assert_eq!(get(&m, KVM_XEN_ATTR_TYPE_SHARED_INFO), Ok(SHARED >> 12));
    assert_eq!(get(&m, KVM_XEN_ATTR_TYPE_UPCALL_VECTOR), Ok(VECTOR.into()));
    assert_eq!(get(&m, KVM_XEN_ATTR_TYPE_XEN_VERSION), Ok(0));
    assert_eq!(get(&m, KVM_XEN_ATTR_TYPE_RUNSTATE_UPDATE_FLAG), Ok(0));
    for kind in [
        KVM_XEN_ATTR_TYPE_EVTCHN,
        KVM_XEN_ATTR_TYPE_SHARED_INFO_HVA,
        100,
    ] {
        assert_eq!(get(&m, kind), Err(libc::ENOENT), "{kind}");
    }
    assert_eq!(set(&m, 100, |_| ()), Err(libc::ENOENT));
    let gfn = |gfn| {
        set(&m, KVM_XEN_ATTR_TYPE_SHARED_INFO, |u| {
            u.shared_info.gfn = gfn;
        })
    };
    assert_eq!(gfn(1 << 30), Err(libc::EFAULT));
    assert_eq!(gfn(NOWHERE - 1), Err(libc::EFAULT));
    let vector = |v| set(&m, KVM_XEN_ATTR_TYPE_UPCALL_VECTOR, |u| u.vector = v);
    assert_eq!(vector(15), Err(libc::EINVAL));
    // Events.
    assert_eq!(send(&m, 0, 0), Err(libc::EINVAL));
    assert_eq!(send(&m, 0, 4096), Err(libc::EINVAL));
    assert_eq!(send(&m, 1, 3), Err(libc::EINVAL));
    gfn(NOWHERE).unwrap();
    assert_eq!(send(&m, 0, 3), Err(libc::EINVAL));
    assert_eq!(get(&m, KVM_XEN_ATTR_TYPE_SHARED_INFO), Ok(NOWHERE));
    for (channel, want) in [
        (channel(0, IPI, 0, 0), Err(libc::EINVAL)),
        (channel(4096, IPI, 4096, 0), Err(libc::EINVAL)),
        (channel(3, IPI, 4, 0), Err(libc::EINVAL)),
        (channel(3, 1, 3, 0), Err(libc::EINVAL)),
        (channel(3, INTERDOMAIN, 4096, 0), Err(libc::EINVAL)),
        (
            channel(3, IPI, 3, KVM_XEN_EVTCHN_DEASSIGN),
            Err(libc::ENOENT),
        ),
        (channel(3, IPI, 3, KVM_XEN_EVTCHN_UPDATE), Err(libc::ENOENT)),
        (channel(3, IPI, 3, 0), Ok(0)),
        (channel(3, IPI, 3, 0), Err(libc::EEXIST)),
        (channel(3, IPI, 3, KVM_XEN_EVTCHN_UPDATE), Ok(0)),
        (channel(3, IPI, 4, KVM_XEN_EVTCHN_UPDATE), Err(libc::EINVAL)),
        (
            channel(3, INTERDOMAIN, 3, KVM_XEN_EVTCHN_UPDATE),
            Err(libc::EINVAL),
        ),
        (channel(3, IPI, 3, 8), Err(libc::EINVAL)),
        (channel(3, IPI, 3, KVM_XEN_EVTCHN_DEASSIGN), Ok(0)),
        (channel(3, IPI, 3, 0), Ok(0)),
        (channel(0, 0, 0, KVM_XEN_EVTCHN_RESET), Ok(0)),
        (channel(3, IPI, 3, 0), Ok(0)),
    ] {
        let named = (channel.send_port, channel.type_, channel.flags);
        assert_eq!(set_channel(&m, channel), want, "{named:?}");
    }
    let mut no_eventfd = channel(5, INTERDOMAIN, 0, 0);
    no_eventfd.deliver.eventfd.fd = -1;
    assert_eq!(set_channel(&m, no_eventfd), Err(libc::EBADF));
    // Of a vCPU.
    let gpa = |kind, gpa| set_vcpu(&vcpu, kind, |u| u.gpa = gpa);
    assert_eq!(set_info(&vcpu, INFO + 2), Err(libc::ENXIO));
    for kind in [
        KVM_XEN_VCPU_ATTR_TYPE_VCPU_INFO,
        KVM_XEN_VCPU_ATTR_TYPE_VCPU_TIME_INFO,
        KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADDR,
    ] {
        assert_eq!(gpa(kind, 1 << 40), Err(libc::EFAULT), "{kind}");
        gpa(kind, NOWHERE).unwrap();
    }
    let id = |id| set_vcpu(&vcpu, KVM_XEN_VCPU_ATTR_TYPE_VCPU_ID, |u| u.vcpu_id = id);
    assert_eq!((id(1024), id(1023)), (Err(libc::EINVAL), Ok(0)));
    let vector = |v| {
        set_vcpu(&vcpu, KVM_XEN_VCPU_ATTR_TYPE_UPCALL_VECTOR, |u| {
            u.vector = v;
        })
    };
    assert_eq!((vector(15), vector(16)), (Err(libc::EINVAL), Ok(0)));
    let priority = |priority| {
        let timer = Timer {
            port: 1,
            priority,
            ..Default::default()
        };
        set_vcpu(&vcpu, KVM_XEN_VCPU_ATTR_TYPE_TIMER, |u| u.timer = timer)
    };
    assert_eq!(
        (priority(0), priority(PRIORITY)),
        (Err(libc::EINVAL), Ok(0))
    );
    assert_eq!(set_vcpu(&vcpu, 100, |_| ()), Err(libc::ENOENT));
}

#[test]
fn the_width_follows_whoever_writes_the_page() {
    let (m, vcpu) = machine();
    set(&m, KVM_XEN_ATTR_TYPE_LONG_MODE, |u| u.long_mode = 0).unwrap();
    assert!(set_msr(&vcpu, MSR, 0x8000));
    assert_eq!(get(&m, KVM_XEN_ATTR_TYPE_LONG_MODE), Ok(1));
    assert_ne!(word(&m, SHARED + 0xc00), 0, "the wall clock");
}

#[test]
fn cpuid_tells_of_the_clock() {
    let m = Machine::new();
    let vcpu = m.vcpu(0, CODE);
    let leaf = |function, index, first| kvm_cpuid_entry2 {
        function,
        index,
        eax: first,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        ..Default::default()
    };
    let mut base = leaf(0x4000_0100, 0, 0x4000_0104);
    (base.ebx, base.ecx, base.edx) = (0x566e_6558, 0x6558_4d4d, 0x4d4d_566e);
    let time = [1, 2].map(|index| leaf(0x4000_0103, index, 0));
    let table = [base, time[0], time[1]];
    vcpu.set_cpuid2(&CpuId::from_entries(&table).unwrap())
        .unwrap();
    let shown = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap();
    let find = |index| {
        let mut entries = shown.as_slice().iter();
        *entries
            .find(|e| e.function == 0x4000_0103 && e.index == index)
            .unwrap()
    };
    assert_eq!(find(2).eax, vcpu.get_tsc_khz().unwrap());
    let ns_per_second = (u64::from(find(1).ecx) * u64::from(find(2).eax) * 1000) >> 32;
    let shift = find(1).edx as i32;
    let ns = if shift < 0 {
        ns_per_second >> -shift
    } else {
        ns_per_second << shift
    };
    assert!(ns.abs_diff(1_000_000_000) < 1000, "{ns}");
}

#[test]
fn the_interpreter_does_the_same() {
    engines::again_on("interp");
}
