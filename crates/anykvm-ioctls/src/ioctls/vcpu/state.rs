//! A vCPU's state: the KVM_GET_ and KVM_SET_ calls.

use std::num::NonZeroUsize;

use kvm_bindings::*;
use vmm_sys_util::errno;

use super::{KvmNestedStateBuffer, VcpuFd, reg_size};
use crate::ioctls::Result;
use crate::kvm_ioctls::*;

impl VcpuFd {
    fn typed(&self) -> Result<&kvm_abi::TypedVcpu> {
        Ok(self.object()?.hypervisor())
    }

    /// KVM_GET_REGS: general registers, RIP and RFLAGS.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_regs(&self) -> Result<kvm_regs> {
        self.typed()?.get_regs().map_err(refused)
    }

    /// KVM_SET_REGS: general registers, RIP and RFLAGS.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<()> {
        self.typed()?.set_regs(regs).map_err(refused)
    }

    /// KVM_GET_SREGS: segments, descriptor tables, control registers, EFER and APIC base.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_sregs(&self) -> Result<kvm_sregs> {
        self.typed()?.get_sregs().map_err(refused)
    }

    /// KVM_SET_SREGS.
    ///
    /// # Errors
    ///
    /// EINVAL for a combination that no CPU can be in.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<()> {
        self.typed()?.set_sregs(sregs).map_err(refused)
    }

    /// KVM_GET_FPU: x87 and SSE registers.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_fpu(&self) -> Result<kvm_fpu> {
        self.typed()?.get_fpu().map_err(refused)
    }

    /// KVM_SET_FPU.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn set_fpu(&self, fpu: &kvm_fpu) -> Result<()> {
        self.typed()?.set_fpu(fpu).map_err(refused)
    }

    /// KVM_SET_CPUID2: what CPUID tells the guest.
    ///
    /// # Errors
    ///
    /// EINVAL for a combination that the hypervisor cannot keep.
    pub fn set_cpuid2(&self, cpuid: &CpuId) -> Result<()> {
        self.object()?.set_cpuid2(cpuid.as_slice()).map_err(refused)
    }

    /// KVM_GET_CPUID2.
    ///
    /// # Errors
    ///
    /// ENOMEM for more than [`KVM_MAX_CPUID_ENTRIES`], E2BIG when `num_entries` are too few.
    pub fn get_cpuid2(&self, num_entries: usize) -> Result<CpuId> {
        let no_memory = errno::Error::new(libc::ENOMEM);
        if num_entries > KVM_MAX_CPUID_ENTRIES {
            return Err(no_memory);
        }
        let entries = self.object()?.get_cpuid2(num_entries).map_err(refused)?;
        CpuId::from_entries(&entries).map_err(|_| no_memory)
    }

    /// KVM_ENABLE_CAP on the vCPU.
    ///
    /// # Errors
    ///
    /// EINVAL for a capability that cannot be enabled, or not so.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        self.typed()?.enable_cap(cap).map_err(refused)
    }

    /// KVM_GET_LAPIC: its register page.
    ///
    /// # Errors
    ///
    /// EINVAL without an in-kernel LAPIC.
    pub fn get_lapic(&self) -> Result<kvm_lapic_state> {
        self.typed()?.get_lapic().map_err(refused)
    }

    /// KVM_SET_LAPIC.
    ///
    /// # Errors
    ///
    /// EINVAL without an in-kernel LAPIC.
    pub fn set_lapic(&self, klapic: &kvm_lapic_state) -> Result<()> {
        self.typed()?.set_lapic(klapic).map_err(refused)
    }

    /// KVM_GET_MSRS: fills in values up to the first MSR that does not exist; how many.
    ///
    /// # Errors
    ///
    /// E2BIG for 256 entries and more.
    pub fn get_msrs(&self, msrs: &mut Msrs) -> Result<usize> {
        self.object()?
            .get_msrs(msrs.as_mut_slice())
            .map_err(refused)
    }

    /// KVM_SET_MSRS: sets values up to the first that is refused; how many.
    ///
    /// # Errors
    ///
    /// E2BIG for 256 entries and more.
    pub fn set_msrs(&self, msrs: &Msrs) -> Result<usize> {
        self.object()?.set_msrs(msrs.as_slice()).map_err(refused)
    }

    /// KVM_GET_MP_STATE: running, halted, waiting for a start-up IPI.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_mp_state(&self) -> Result<kvm_mp_state> {
        self.typed()?.get_mp_state().map_err(refused)
    }

    /// KVM_SET_MP_STATE.
    ///
    /// # Errors
    ///
    /// EINVAL for a state that needs an in-kernel LAPIC.
    pub fn set_mp_state(&self, mp_state: kvm_mp_state) -> Result<()> {
        self.typed()?.set_mp_state(mp_state).map_err(refused)
    }

    /// KVM_GET_XSAVE: 4096 bytes in the layout of XSAVE.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_xsave(&self) -> Result<kvm_xsave> {
        self.typed()?.get_xsave().map_err(refused)
    }

    /// KVM_GET_XSAVE2: the same for states larger than 4096 bytes.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    ///
    /// # Safety
    ///
    /// `xsave` must hold as many bytes as KVM_CAP_XSAVE2 says.
    pub unsafe fn get_xsave2(&self, xsave: &mut Xsave) -> Result<()> {
        let image = self.typed()?.get_xsave2().map_err(refused)?;
        let (words, _) = image.as_chunks::<4>();
        let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
        // SAFETY: the length of the array is not changed.
        let state = unsafe { xsave.as_mut_fam_struct() };
        for (to, from) in state.xsave.region.iter_mut().zip(&mut words) {
            *to = from;
        }
        for (to, from) in xsave.as_mut_slice().iter_mut().zip(&mut words) {
            *to = from;
        }
        Ok(())
    }

    /// KVM_SET_XSAVE.
    ///
    /// # Errors
    ///
    /// EINVAL for state components that the vCPU has not.
    ///
    /// # Safety
    ///
    /// With kernel KVM `xsave` must be followed by as many bytes as KVM_CAP_XSAVE2 says; here
    /// only the structure itself is read.
    pub unsafe fn set_xsave(&self, xsave: &kvm_xsave) -> Result<()> {
        self.typed()?.set_xsave(xsave).map_err(refused)
    }

    /// KVM_SET_XSAVE from a [`Self::get_xsave2`] image.
    ///
    /// # Errors
    ///
    /// EINVAL for state components that the vCPU has not.
    ///
    /// # Safety
    ///
    /// As [`Self::set_xsave`].
    pub unsafe fn set_xsave2(&self, xsave: &Xsave) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.set_xsave(&xsave.as_fam_struct_ref().xsave) }
    }

    /// KVM_GET_XCRS: XCR0.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_xcrs(&self) -> Result<kvm_xcrs> {
        self.typed()?.get_xcrs().map_err(refused)
    }

    /// KVM_SET_XCRS.
    ///
    /// # Errors
    ///
    /// EINVAL for bits that the vCPU has not.
    pub fn set_xcrs(&self, xcrs: &kvm_xcrs) -> Result<()> {
        self.typed()?.set_xcrs(xcrs).map_err(refused)
    }

    /// KVM_GET_DEBUGREGS.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_debug_regs(&self) -> Result<kvm_debugregs> {
        self.typed()?.get_debugregs().map_err(refused)
    }

    /// KVM_SET_DEBUGREGS.
    ///
    /// # Errors
    ///
    /// EINVAL for flags or upper halves that are not 0.
    pub fn set_debug_regs(&self, debug_regs: &kvm_debugregs) -> Result<()> {
        self.typed()?.set_debugregs(debug_regs).map_err(refused)
    }

    /// KVM_GET_VCPU_EVENTS: exceptions, interrupts and NMIs on their way.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events> {
        self.typed()?.get_vcpu_events().map_err(refused)
    }

    /// KVM_SET_VCPU_EVENTS.
    ///
    /// # Errors
    ///
    /// EINVAL for unknown flags.
    pub fn set_vcpu_events(&self, vcpu_events: &kvm_vcpu_events) -> Result<()> {
        self.typed()?.set_vcpu_events(vcpu_events).map_err(refused)
    }

    /// KVM_SET_GUEST_DEBUG: breakpoints and single steps for the VMM.
    ///
    /// # Errors
    ///
    /// EINVAL for unknown control bits.
    pub fn set_guest_debug(&self, debug_struct: &kvm_guest_debug) -> Result<()> {
        self.typed()?.set_guest_debug(debug_struct).map_err(refused)
    }

    /// KVM_SET_ONE_REG.
    ///
    /// # Errors
    ///
    /// EINVAL when `data` is shorter than the register, for what is no MSR, and for MSRs that are not there or do not
    /// take the value.
    pub fn set_one_reg(&self, reg_id: u64, data: &[u8]) -> Result<usize> {
        self.one_reg(KVM_SET_ONE_REG, reg_id, data.as_ptr(), data.len())
    }

    /// KVM_GET_ONE_REG.
    ///
    /// # Errors
    ///
    /// As [`Self::set_one_reg`].
    pub fn get_one_reg(&self, reg_id: u64, data: &mut [u8]) -> Result<usize> {
        self.one_reg(KVM_GET_ONE_REG, reg_id, data.as_mut_ptr(), data.len())
    }

    fn one_reg(&self, number: u32, id: u64, data: *const u8, len: usize) -> Result<usize> {
        let size = reg_size(id);
        if len < size {
            return Err(errno::Error::new(libc::EINVAL));
        }
        let addr = data as u64;
        ioctl_with_ref(self, number, &kvm_one_reg { id, addr }).map(|_| size)
    }

    /// KVM_KVMCLOCK_CTRL: tells the guest that it was paused.
    ///
    /// # Errors
    ///
    /// EINVAL before the guest uses kvmclock.
    pub fn kvmclock_ctrl(&self) -> Result<()> {
        self.typed()?.kvmclock_ctrl().map_err(refused)
    }

    /// KVM_GET_TSC_KHZ.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn get_tsc_khz(&self) -> Result<u32> {
        self.typed()?.tsc_khz().map_err(refused)
    }

    /// KVM_SET_TSC_KHZ.
    ///
    /// # Errors
    ///
    /// EINVAL for a frequency that cannot be had.
    pub fn set_tsc_khz(&self, freq: u32) -> Result<()> {
        self.typed()?.set_tsc_khz(freq).map_err(refused)
    }

    /// KVM_TRANSLATE: guest-virtual to guest-physical with the current paging.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn translate_gva(&self, gva: u64) -> Result<kvm_translation> {
        self.typed()?.translate(gva).map_err(refused)
    }

    /// KVM_SMI.
    ///
    /// # Errors
    ///
    /// ENOTTY without system management mode.
    pub fn smi(&self) -> Result<()> {
        self.typed()?.smi().map_err(refused)
    }

    /// KVM_NMI.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a vCPU.
    pub fn nmi(&self) -> Result<()> {
        self.typed()?.nmi().map_err(refused)
    }

    /// KVM_GET_NESTED_STATE: the payload's size, if there is a payload.
    ///
    /// # Errors
    ///
    /// None for a buffer of this type: guests have no nested virtualization, and no payload.
    pub fn nested_state(&self, buffer: &mut KvmNestedStateBuffer) -> Result<Option<NonZeroUsize>> {
        ioctl_with_mut_ptr(self, KVM_GET_NESTED_STATE, std::ptr::from_mut(buffer))?;
        let size = buffer.size as usize;
        Ok(NonZeroUsize::new(size).filter(|_| size > size_of::<kvm_nested_state>()))
    }

    /// KVM_SET_NESTED_STATE.
    ///
    /// # Errors
    ///
    /// EINVAL for the state of a nested guest, which there is none of.
    pub fn set_nested_state(&self, state: &KvmNestedStateBuffer) -> Result<()> {
        ioctl_with_ref(self, KVM_SET_NESTED_STATE, state).map(drop)
    }
}
