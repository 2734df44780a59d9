//! The attributes of KVM_XEN_HVM_SET_ATTR, KVM_XEN_VCPU_SET_ATTR and their counterparts: unions whose member a type names.

use hypervisor::{XenAttr, XenPort, XenRunstate, XenVcpuAttr};
use kvm_bindings::*;

use crate::errno::{Errno, Result};

const NO_SUCH_TYPE: Errno = Errno::new(libc::ENOENT);

/// Returns the attribute. ENOENT for a type that does not exist.
pub(crate) fn vm_attr(attr: &kvm_xen_hvm_attr) -> Result<XenAttr> {
    let u = &attr.u;
    // SAFETY: all members of the unions are integers: any bytes are a value of each.
    Ok(unsafe {
        match u32::from(attr.type_) {
            KVM_XEN_ATTR_TYPE_LONG_MODE => XenAttr::LongMode(u.long_mode != 0),
            KVM_XEN_ATTR_TYPE_SHARED_INFO => XenAttr::SharedInfo(u.shared_info.gfn),
            KVM_XEN_ATTR_TYPE_UPCALL_VECTOR => XenAttr::UpcallVector(u.vector),
            KVM_XEN_ATTR_TYPE_EVTCHN => XenAttr::Event(XenPort {
                send_port: u.evtchn.send_port,
                kind: u.evtchn.type_,
                flags: u.evtchn.flags,
                port: u.evtchn.deliver.port.port,
                vcpu: u.evtchn.deliver.port.vcpu,
                priority: u.evtchn.deliver.port.priority,
                fd: u.evtchn.deliver.eventfd.fd,
            }),
            KVM_XEN_ATTR_TYPE_XEN_VERSION => XenAttr::Version(u.xen_version),
            KVM_XEN_ATTR_TYPE_RUNSTATE_UPDATE_FLAG => {
                XenAttr::RunstateUpdateFlag(u.runstate_update_flag != 0)
            }
            _ => return Err(NO_SUCH_TYPE),
        }
    })
}

/// Stores the attribute's value in the member that its type names.
pub(crate) fn store_vm_attr(value: XenAttr, attr: &mut kvm_xen_hvm_attr) {
    let u = &mut attr.u;
    match value {
        XenAttr::LongMode(is_long) => u.long_mode = is_long.into(),
        XenAttr::SharedInfo(gfn) => u.shared_info.gfn = gfn,
        XenAttr::UpcallVector(vector) => u.vector = vector,
        XenAttr::Version(version) => u.xen_version = version,
        XenAttr::RunstateUpdateFlag(on) => u.runstate_update_flag = on.into(),
        // It can only be set.
        XenAttr::Event(_) => {}
    }
}

/// Returns the attribute. ENOENT for a type that does not exist.
pub(crate) fn vcpu_attr(attr: &kvm_xen_vcpu_attr) -> Result<XenVcpuAttr> {
    let u = &attr.u;
    // SAFETY: all members of the union are integers: any bytes are a value of each.
    let (gpa, runstate, vcpu_id, timer, vector) =
        unsafe { (u.gpa, u.runstate, u.vcpu_id, u.timer, u.vector) };
    let times = XenRunstate {
        state: runstate.state,
        entry_ns: runstate.state_entry_time,
        times: [
            runstate.time_running,
            runstate.time_runnable,
            runstate.time_blocked,
            runstate.time_offline,
        ],
    };
    Ok(match u32::from(attr.type_) {
        KVM_XEN_VCPU_ATTR_TYPE_VCPU_INFO => XenVcpuAttr::VcpuInfo(gpa),
        KVM_XEN_VCPU_ATTR_TYPE_VCPU_TIME_INFO => XenVcpuAttr::TimeInfo(gpa),
        KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADDR => XenVcpuAttr::RunstateAddr(gpa),
        KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_CURRENT => XenVcpuAttr::RunstateCurrent(runstate.state),
        KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_DATA => XenVcpuAttr::RunstateData(times),
        KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADJUST => XenVcpuAttr::RunstateAdjust(times),
        KVM_XEN_VCPU_ATTR_TYPE_VCPU_ID => XenVcpuAttr::VcpuId(vcpu_id),
        KVM_XEN_VCPU_ATTR_TYPE_TIMER => XenVcpuAttr::Timer {
            port: timer.port,
            priority: timer.priority,
            expires_ns: timer.expires_ns,
        },
        KVM_XEN_VCPU_ATTR_TYPE_UPCALL_VECTOR => XenVcpuAttr::UpcallVector(vector),
        _ => return Err(NO_SUCH_TYPE),
    })
}

/// Stores the attribute's value in the member that its type names.
pub(crate) fn store_vcpu_attr(value: XenVcpuAttr, attr: &mut kvm_xen_vcpu_attr) {
    let u = &mut attr.u;
    match value {
        XenVcpuAttr::VcpuInfo(gpa)
        | XenVcpuAttr::TimeInfo(gpa)
        | XenVcpuAttr::RunstateAddr(gpa) => u.gpa = gpa,
        XenVcpuAttr::RunstateCurrent(state) => u.runstate.state = state,
        XenVcpuAttr::RunstateData(data) | XenVcpuAttr::RunstateAdjust(data) => {
            let [time_running, time_runnable, time_blocked, time_offline] = data.times;
            u.runstate = kvm_xen_vcpu_attr__bindgen_ty_1__bindgen_ty_1 {
                state: data.state,
                state_entry_time: data.entry_ns,
                time_running,
                time_runnable,
                time_blocked,
                time_offline,
            };
        }
        XenVcpuAttr::VcpuId(id) => u.vcpu_id = id,
        XenVcpuAttr::Timer {
            port,
            priority,
            expires_ns,
        } => {
            u.timer = kvm_xen_vcpu_attr__bindgen_ty_1__bindgen_ty_2 {
                port,
                priority,
                expires_ns,
            };
        }
        XenVcpuAttr::UpcallVector(vector) => u.vector = vector,
    }
}
