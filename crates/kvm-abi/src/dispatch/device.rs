//! ioctls of a device's descriptor.

use std::sync::Arc;

use super::{Row, done};
use crate::device::Device;
use crate::numbers::*;

pub(crate) const TABLE: &[Row<Arc<Device>>] = &[
    Row::done("KVM_SET_DEVICE_ATTR", KVM_SET_DEVICE_ATTR, |device, arg| {
        done(device.set_attr(&arg.read()?))
    }),
    Row::done("KVM_GET_DEVICE_ATTR", KVM_GET_DEVICE_ATTR, |device, arg| {
        done(device.get_attr(&arg.read()?))
    }),
    Row::done("KVM_HAS_DEVICE_ATTR", KVM_HAS_DEVICE_ATTR, |device, arg| {
        done(device.has_attr(&arg.read()?))
    }),
];
