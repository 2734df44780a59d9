//! Events of a vCPU: the upcall that tells of them, its timer, and the wait for them (SCHEDOP_poll).

use std::sync::atomic::Ordering;

use x86_cpu::CpuState;

use crate::{
    Error, Result,
    vcpu::bus::{Bus, EFAULT, EINVAL, apic::NEVER},
    vm::xen::{
        FIRST_VECTOR,
        events::{Event, tell},
    },
};

/// How far in the future a timer is set instead of one that Linux has computed wrongly.
const LINUX_NS: u64 = 100_000_000;
/// Timers that are further in the future are taken for wrong: 13 days.
const LINUX_LIMIT_NS: u64 = 1 << 50;
/// Largest number of ports that a vCPU may wait for.
const MAX_POLLED: u32 = 128;

/// A vCPU's timer, which raises an event once.
#[derive(Debug)]
pub(super) struct Timer {
    /// The port; 0: there is no timer.
    port: u32,
    /// When it fires, on kvmclock; 0: it does not run.
    expires_ns: u64,
    /// The same on the monotonic clock.
    due_ns: u64,
}

impl Timer {
    /// Returns a timer of this port that does not run.
    pub(super) const fn stopped(port: u32) -> Self {
        Self {
            port,
            expires_ns: 0,
            due_ns: NEVER,
        }
    }
}

/// What a vCPU waits for.
#[derive(Debug)]
pub(super) struct Poll {
    ports: Vec<u32>,
    /// End of the wait on the monotonic clock.
    until_ns: u64,
}

impl Bus {
    /// Returns the vector of an upcall that is to be delivered, if it is the vector of all vCPUs.
    #[inline]
    pub(in crate::vcpu) fn upcall(&self) -> Option<u8> {
        match self.vm.xen.upcall_vector() {
            0 => None,
            vector => self.is_upcall_pending().then_some(vector),
        }
    }

    fn is_upcall_pending(&self) -> bool {
        let pending = self.shared.xen.info();
        let pending = pending.and_then(|info| self.vm.memory.read_gpa(info, 1));
        pending.is_some_and(|pending| pending != 0)
    }

    /// Looks at the LAPIC after a write to it: one that is switched on gets the upcall that it has missed.
    #[inline]
    pub(in crate::vcpu) fn follow_lapic_for_xen(&mut self) {
        if self.shared.xen.vector.load(Ordering::Relaxed) != 0 {
            self.look_at_lapic();
        }
    }

    #[cold]
    fn look_at_lapic(&mut self) {
        let is_on = self.shared.lapic().is_software_enabled();
        let was_on = std::mem::replace(&mut self.xen.had_lapic, is_on);
        if is_on && !was_on && self.is_upcall_pending() {
            tell(&self.shared);
        }
    }

    /// KVM_XEN_VCPU_ATTR_TYPE_UPCALL_VECTOR. EINVAL for the vector of an exception.
    pub(super) fn set_upcall_vector(&mut self, vector: u8) -> Result<()> {
        if (1..FIRST_VECTOR).contains(&vector) {
            return Err(Error::InvalidArgument);
        }
        self.xen.had_lapic = self.shared.lapic().is_software_enabled();
        self.shared.xen.vector.store(vector, Ordering::Relaxed);
        Ok(())
    }

    /// Tells the guest of events that its structure could not be told of.
    #[inline]
    pub(in crate::vcpu) fn tell_untold_events(&mut self) {
        let untold = &self.shared.xen.untold;
        if untold.load(Ordering::Relaxed) != 0 && self.shared.xen.info().is_some() {
            let words = untold.swap(0, Ordering::SeqCst);
            self.vm.select_events(&self.shared, words);
        }
    }

    pub(super) const fn has_xen_timer(&self) -> bool {
        self.xen.timer.port != 0
    }

    /// Returns when the timer, or the wait for an event, ends on the monotonic clock.
    pub(in crate::vcpu) fn xen_due_ns(&self) -> u64 {
        let poll_ns = self.xen.poll.as_ref().map_or(NEVER, |poll| poll.until_ns);
        self.xen.timer.due_ns.min(poll_ns)
    }

    /// Sets the timer to a time on kvmclock. As in Xen, a time that Linux must have computed wrongly is replaced if
    /// `mends`.
    pub(super) fn start_xen_timer(&mut self, mut expires_ns: u64, mends: bool) {
        let (now_ns, _) = self.vm.clock.now();
        let mut left_ns = expires_ns.saturating_sub(now_ns);
        if mends && ((expires_ns as i64) < 0 || left_ns >= LINUX_LIMIT_NS) {
            left_ns = LINUX_NS;
            expires_ns = now_ns + LINUX_NS;
        }
        let timer = &mut self.xen.timer;
        timer.expires_ns = expires_ns;
        timer.due_ns = host::clock::monotonic_ns().saturating_add(left_ns);
        // It may be due before the clock would be read next.
        self.recheck = true;
    }

    pub(super) fn stop_xen_timer(&mut self) {
        self.xen.timer = Timer::stopped(self.xen.timer.port);
    }

    /// Raises the timer's event if it is due.
    #[inline]
    pub(in crate::vcpu) fn service_xen_timer(&mut self, now_ns: u64) {
        if self.xen.timer.due_ns <= now_ns {
            self.expire_xen_timer();
        }
    }

    #[cold]
    fn expire_xen_timer(&mut self) {
        self.stop_xen_timer();
        let event = Event {
            vcpu: self.shared.id,
            port: self.xen.timer.port,
        };
        // Without a page that the guest shares the event is lost, as in KVM.
        let _ = self.vm.send_event(&self.vm.vcpus(), event);
    }

    /// KVM_XEN_VCPU_ATTR_TYPE_TIMER: a port and a time on kvmclock, or zeros.
    pub(super) fn set_xen_timer(&mut self, port: u32, expires_ns: u64) {
        self.xen.timer = Timer::stopped(port);
        if port != 0 && expires_ns != 0 {
            self.start_xen_timer(expires_ns, false);
        }
    }

    /// Returns the port and, if the timer runs, the time.
    pub(super) fn xen_timer(&mut self) -> (u32, u64) {
        self.service_xen_timer(host::clock::monotonic_ns());
        (self.xen.timer.port, self.xen.timer.expires_ns)
    }

    /// SCHEDOP_poll: has the vCPU sleep behind this instruction until one of the ports has an event, an interrupt comes or the
    /// time is over. Returns the call's result.
    pub(super) fn poll_events(&mut self, cpu: &mut CpuState, gva: u64, longmode: bool) -> u64 {
        // A pointer to the ports, their number, and a duration.
        let args = if longmode {
            self.read_words(cpu, gva).map(|[low, high, nr, _, a, b]| {
                (u64::from(low) | u64::from(high) << 32, nr, [a, b])
            })
        } else {
            let words = self.read_words(cpu, gva);
            words.map(|[ports, nr, a, b]| (ports.into(), nr, [a, b]))
        };
        let Some((pointer, nr, [low, high])) = args else {
            return EFAULT;
        };
        if nr > MAX_POLLED {
            return EINVAL;
        }
        let mut bytes = vec![[0; 4]; nr as usize];
        if !self.read_guest(cpu, pointer, bytes.as_flattened_mut()) {
            return EFAULT;
        }
        let ports: Vec<u32> = bytes.into_iter().map(u32::from_le_bytes).collect();
        let limit = self.vm.xen.layout().ports();
        if ports.iter().any(|port| *port >= limit) {
            return EINVAL;
        }
        let until_ns = match u64::from(low) | u64::from(high) << 32 {
            0 => NEVER,
            ns => host::clock::monotonic_ns().saturating_add(ns),
        };
        self.xen.poll = Some(Poll { ports, until_ns });
        self.shared.xen.is_polling.store(true, Ordering::SeqCst);
        self.recheck = true;
        0
    }

    /// True while the vCPU waits for an event that has not come.
    #[inline]
    pub(in crate::vcpu) fn is_polling(&mut self) -> bool {
        self.xen.poll.is_some() && self.goes_on_polling()
    }

    #[cold]
    fn goes_on_polling(&mut self) -> bool {
        let goes_on = self.xen.poll.as_ref().is_some_and(|poll| {
            let is_over = poll.until_ns <= host::clock::monotonic_ns();
            !is_over && !poll.ports.iter().any(|p| self.vm.is_event_pending(*p))
        });
        if !goes_on {
            self.stop_polling();
        }
        goes_on
    }

    /// Ends the wait.
    #[inline]
    pub(in crate::vcpu) fn stop_polling(&mut self) {
        if self.xen.poll.take().is_some() {
            self.shared.xen.is_polling.store(false, Ordering::SeqCst);
        }
    }

    /// Returns the addresses of Xen's structures of time.
    pub(in crate::vcpu) fn xen_times(&self) -> [Option<u64>; 2] {
        /// Offset in `struct vcpu_info`.
        const TIME: u64 = 32;
        let info = self.shared.xen.info();
        [info.map(|info| info.wrapping_add(TIME)), self.xen.time_info]
    }
}
