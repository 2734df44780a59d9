//! One sequence: threads that make random calls on the same descriptors.

use std::{
    collections::BTreeMap,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use host::EventFd;
use kvm_abi::{Call, FdKind, Object, Vcpu, numbers::*};

use super::{
    arena::{Arena, RAM},
    arguments::Arguments,
    errno::{is_documented, takes_pointer},
};
use crate::Random;

/// What sequences have done.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Number of calls.
    pub calls: u64,
    /// Number of successful calls.
    pub successes: u64,
    /// Number of calls by name, and of successful ones.
    pub by_name: BTreeMap<&'static str, (u64, u64)>,
    /// Descriptions of what was wrong.
    pub findings: Vec<String>,
}

impl Counts {
    /// Adds the counts of another sequence.
    pub fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.successes += other.successes;
        for (name, (made, good)) in other.by_name {
            let entry = self.by_name.entry(name).or_default();
            entry.0 += made;
            entry.1 += good;
        }
        self.findings.extend(other.findings);
    }
}

/// What the threads share.
struct Shared<'a> {
    arena: &'a Arena,
    calls: &'a [Call],
    fds: Mutex<Vec<(FdKind, RawFd)>>,
    vcpus: Mutex<Vec<Weak<Vcpu>>>,
    events: Vec<EventFd>,
    is_over: AtomicBool,
    /// Grows before each close of a descriptor.
    closes: AtomicU64,
    wild_slots: bool,
}

/// Runs the sequence of a seed: one to three threads with `length` calls each.
pub fn run_sequence(arena: &Arena, seed: u64, length: u64, wild_slots: bool) -> Counts {
    let mut random = Random::new(seed);
    arena.fill(&mut random);
    let calls = kvm_abi::calls();
    let shared = Shared {
        arena,
        calls: &calls,
        fds: Mutex::default(),
        vcpus: Mutex::default(),
        events: (0..3).filter_map(|_| EventFd::new(0).ok()).collect(),
        is_over: AtomicBool::new(false),
        closes: AtomicU64::new(0),
        wild_slots,
    };
    let threads = 1 + random.below(3);
    let mut counts = Counts::default();
    thread::scope(|scope| {
        let kicker = scope.spawn(|| kick(&shared));
        let workers: Vec<_> = (0..threads)
            .map(|n| {
                let shared = &shared;
                let random = Random::new(seed.rotate_left(17) ^ n.wrapping_mul(0x9e37_79b9));
                scope.spawn(move || Worker::new(shared, random, n).run(length))
            })
            .collect();
        for worker in workers {
            match worker.join() {
                Ok(theirs) => counts.add(theirs),
                Err(_) => counts.findings.push("a call panicked".to_owned()),
            }
        }
        shared.is_over.store(true, Ordering::Release);
        let _ = kicker.join();
    });
    // This also closes descriptors that no thread noted: one whose number another thread had closed and given to
    // another object, or one from a structure that a guest has overwritten.
    for fd in kvm_abi::known_descriptors() {
        if let Err(error) = kvm_abi::close(fd) {
            counts.findings.push(format!(
                "descriptor {fd} is an object's for us, and to close it gives {error:?}"
            ));
        }
    }
    counts
}

/// Makes every KVM_RUN end soon, until the workers are done.
fn kick(shared: &Shared<'_>) {
    while !shared.is_over.load(Ordering::Acquire) {
        thread::sleep(Duration::from_micros(500));
        lock(&shared.vcpus).retain(|vcpu| {
            let vcpu = vcpu.upgrade();
            if let Some(vcpu) = &vcpu {
                vcpu.hypervisor().kick();
            }
            vcpu.is_some()
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Worker<'a> {
    shared: &'a Shared<'a>,
    arguments: Arguments<'a>,
    random: Random,
    counts: Counts,
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared<'a>, random: Random, number: u64) -> Self {
        Self {
            shared,
            arguments: Arguments {
                arena: shared.arena,
                slice: shared.arena.slice(number),
                wild_slots: shared.wild_slots,
            },
            random,
            counts: Counts::default(),
        }
    }

    fn run(mut self, length: u64) -> Counts {
        for _ in 0..length {
            self.step();
        }
        self.counts
    }

    fn step(&mut self) {
        let known = lock(&self.shared.fds).clone();
        let systems = known.iter().filter(|(kind, _)| *kind == FdKind::System);
        if systems.count() == 0 {
            if let Ok(fd) = kvm_abi::system::open(true) {
                self.publish(FdKind::System, std::os::fd::IntoRawFd::into_raw_fd(fd));
            }
            return;
        }
        // Mostly there are up to two VMs with up to four vCPUs each.
        let count = |wanted| known.iter().filter(|(kind, _)| *kind == wanted).count();
        let (vms, vcpus) = (count(FdKind::Vm), count(FdKind::Vcpu));
        let forced = if vms == 0 {
            Some((FdKind::System, KVM_CREATE_VM))
        } else if vcpus == 0 && self.random.one_in(2) {
            Some((FdKind::Vm, KVM_CREATE_VCPU))
        } else if vcpus != 0 && self.random.one_in(6) {
            Some((FdKind::Vcpu, KVM_RUN))
        } else {
            None
        };
        let crowded = known.len() > 12;
        if crowded || forced.is_none() && self.random.one_in(64) {
            let (_, fd) = self.random.pick(&known);
            lock(&self.shared.fds).retain(|(_, other)| *other != fd);
            self.shared.closes.fetch_add(1, Ordering::SeqCst);
            let _ = kvm_abi::close(fd);
            return;
        }
        if forced.is_none() && self.random.one_in(16) {
            self.signal();
            return;
        }
        if forced.is_none() && self.random.one_in(32) {
            self.change_memory();
            return;
        }
        let kind = forced.map_or_else(
            || {
                self.random.pick(&[
                    FdKind::System,
                    FdKind::Vm,
                    FdKind::Vm,
                    FdKind::Vcpu,
                    FdKind::Vcpu,
                    FdKind::Device,
                ])
            },
            |(kind, _)| kind,
        );
        let number = match forced {
            Some((_, number)) => number,
            None => self.number(kind),
        };
        let of_kind: Vec<RawFd> = known
            .iter()
            .filter(|(other, _)| *other == kind)
            .map(|(_, fd)| *fd)
            .collect();
        if of_kind.is_empty() {
            return;
        }
        let fd = self.random.pick(&of_kind);
        // The typed call returns a descriptor that is owned, which is not ours to close.
        if number == KVM_GET_STATS_FD {
            match kvm_abi::lookup(fd) {
                Ok(Object::Vm(vm)) => drop(vm.stats_fd()),
                Ok(Object::Vcpu(vcpu)) => drop(vcpu.stats_fd()),
                _ => {}
            }
            return;
        }
        self.call(kind, fd, number, &known);
    }

    /// Announces that some of the RAM is about to change, as the preload library does before mprotect(2), and leaves it
    /// as it is.
    fn change_memory(&mut self) {
        let start = self.random.below(RAM);
        let len = self.random.below(RAM);
        match kvm_abi::host_memory::begin(self.shared.arena.ram() + start, len) {
            Ok(change) => drop(change),
            Err(error) => self.found(None, 0, format!("a change of memory gives {error:?}")),
        }
    }

    /// Writes to an eventfd, as the preload library does; or announces the close of a descriptor.
    fn signal(&mut self) {
        let events: Vec<RawFd> = self.shared.events.iter().map(AsRawFd::as_raw_fd).collect();
        if events.is_empty() {
            return;
        }
        let fd = self.random.pick(&events);
        let one = 1u64;
        let good = &raw const one as usize;
        let address = self.random.pick(&[good, good, good, 0, 8, usize::MAX]);
        if self.random.one_in(16) {
            kvm_abi::forget_irqfds(fd, fd);
        } else if kvm_abi::is_irqfd(fd) && kvm_abi::write_irqfd(fd, address, 8) && address != good {
            self.found(None, 0, format!("a write from {address:#x} succeeded"));
        }
    }

    /// Returns the number of a call of this kind of descriptor, of another kind, or of none.
    fn number(&mut self, kind: FdKind) -> u32 {
        let own: Vec<u32> = self
            .shared
            .calls
            .iter()
            .filter(|call| call.kind == kind)
            .map(|call| call.number)
            .collect();
        match self.random.below(32) {
            0 => 0xae00 | self.random.below(256) as u32,
            // The right call with another size or direction.
            1 => self.random.pick(&own) ^ 1 << (16 + self.random.below(16)),
            2 => self.random.next() as u32,
            3 => {
                let all: Vec<u32> = self.shared.calls.iter().map(|call| call.number).collect();
                self.random.pick(&all)
            }
            _ => self.random.pick(&own),
        }
    }

    fn call(&mut self, kind: FdKind, fd: RawFd, number: u32, known: &[(FdKind, RawFd)]) {
        let call = self
            .shared
            .calls
            .iter()
            .find(|call| call.kind == kind && call.number == number)
            .copied();
        let mut fds: Vec<i32> = self.shared.events.iter().map(AsRawFd::as_raw_fd).collect();
        fds.extend(known.iter().map(|(_, fd)| *fd));
        fds.extend([-1, 0, 9999]);
        let is_pointer = call.as_ref().is_none_or(takes_pointer);
        let (value, is_bad) = if is_pointer {
            let argument = self
                .arguments
                .pointer(&mut self.random, number, call.as_ref(), &fds);
            (argument.value, argument.is_bad)
        } else {
            (
                self.arguments.number(&mut self.random, kind, call.as_ref()),
                false,
            )
        };
        let closes = self.shared.closes.load(Ordering::SeqCst);
        let result = kvm_abi::ioctl(fd, number, value);
        self.counts.calls += 1;
        if let Some(call) = &call {
            let entry = self.counts.by_name.entry(call.name).or_default();
            entry.0 += 1;
            entry.1 += u64::from(result.is_ok());
        }
        match result {
            Ok(given) => {
                self.counts.successes += 1;
                self.created(kind, number, given, value);
                let ignores = call.is_some_and(|call| IGNORE_NULL.contains(&call.name));
                if is_bad && is_pointer && !(ignores && value == 0) {
                    self.found(
                        call,
                        number,
                        format!("succeeded with the address {value:#x}"),
                    );
                }
            }
            // Another thread has closed it, or the number is another object's by now.
            Err(_) if !self.is_same(kind, fd) => {}
            // The number may have been another object's in between.
            Err(error)
                if [libc::EBADF, libc::ENOTTY].contains(&error.get())
                    && closes != self.shared.closes.load(Ordering::SeqCst) => {}
            Err(error) => {
                if !is_documented(kind, number, call.as_ref(), error.get()) {
                    self.found(call, number, format!("{error:?} with {value:#x}"));
                }
            }
        }
    }

    /// Returns true if the number is still a descriptor of this kind.
    fn is_same(&self, kind: FdKind, fd: RawFd) -> bool {
        matches!(
            (kind, kvm_abi::lookup(fd)),
            (FdKind::System, Ok(Object::System))
                | (FdKind::Vm, Ok(Object::Vm(_)))
                | (FdKind::Vcpu, Ok(Object::Vcpu(_)))
                | (FdKind::Device, Ok(Object::Device(_)))
        )
    }

    fn found(&mut self, call: Option<Call>, number: u32, what: String) {
        if self.counts.findings.len() < 20 {
            let name = call.map_or("no call", |call| call.name);
            let finding = format!("{name} ({number:#x}): {what}");
            self.counts.findings.push(finding);
        }
    }

    /// Notes the descriptor that a successful call may have made.
    fn created(&mut self, kind: FdKind, number: u32, given: i32, argument: u64) {
        match (kind, number) {
            (FdKind::System, KVM_CREATE_VM) => {
                if let Ok(Object::Vm(vm)) = kvm_abi::lookup(given) {
                    self.furnish(&vm);
                }
                self.publish(FdKind::Vm, given);
            }
            (FdKind::Vm, KVM_CREATE_VCPU) => {
                if let Ok(Object::Vcpu(vcpu)) = kvm_abi::lookup(given) {
                    // It is noted first, as another thread may run it already, by a number that was another vCPU's.
                    lock(&self.shared.vcpus).push(Arc::downgrade(&vcpu));
                    self.start(&vcpu);
                }
                self.publish(FdKind::Vcpu, given);
            }
            (FdKind::Vm, KVM_CREATE_DEVICE) => {
                // struct kvm_create_device: type, fd, flags. Another thread may have overwritten it.
                let mut bytes = [0; 12];
                self.shared.arena.read(argument, &mut bytes);
                let fd = i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
                if bytes[8] & 1 == 0 && self.is_same(FdKind::Device, fd) {
                    self.publish(FdKind::Device, fd);
                }
            }
            _ => {}
        }
    }

    /// Gives most VMs memory, and half of them chips.
    fn furnish(&mut self, vm: &kvm_abi::Vm) {
        if self.random.one_in(4) {
            let ring = kvm_bindings::kvm_enable_cap {
                cap: kvm_bindings::KVM_CAP_DIRTY_LOG_RING,
                args: [self.random.pick(&[4096, 8192, 1 << 20]), 0, 0, 0],
                ..Default::default()
            };
            let _ = vm.hypervisor().enable_cap(&ring);
        }
        if self.random.one_in(4) {
            return;
        }
        let region = kvm_bindings::kvm_userspace_memory_region {
            memory_size: RAM / 2,
            userspace_addr: self.shared.arena.ram(),
            flags: self.random.below(2) as u32,
            ..Default::default()
        };
        // A VM that gets no memory is just as good.
        let _ = vm.set_user_memory_region(&region);
        if self.random.one_in(2) {
            let _ = vm.hypervisor().create_irqchip();
            let _ = vm.create_pit();
        }
    }

    /// Makes most vCPUs execute something, in real mode.
    fn start(&mut self, vcpu: &Vcpu) {
        if self.random.one_in(4) {
            return;
        }
        let vcpu = vcpu.hypervisor();
        let Ok(mut sregs) = vcpu.get_sregs() else {
            return;
        };
        sregs.cs.base = 0;
        sregs.cs.selector = 0;
        let regs = kvm_bindings::kvm_regs {
            rip: 0x1000 + 64 * self.random.below(256),
            rflags: 2,
            rsp: 0x8000,
            rbx: self.random.below(0xffff),
            ..Default::default()
        };
        let _ = vcpu.set_sregs(&sregs);
        let _ = vcpu.set_regs(&regs);
        let _ = vcpu.set_mp_state(kvm_bindings::kvm_mp_state { mp_state: 0 });
    }

    fn publish(&self, kind: FdKind, fd: RawFd) {
        lock(&self.shared.fds).push((kind, fd));
    }
}

/// Calls for which a null argument has a meaning.
const IGNORE_NULL: &[&str] = &["KVM_SET_SIGNAL_MASK"];
