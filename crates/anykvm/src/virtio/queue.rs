//! Takes descriptor chains from a queue, one after the other, within limits.

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::bitmap::{AtomicBitmap, BS};

use crate::memory::GuestMemory;

/// Reads what the guest has written for the device.
pub(super) type Reader<'a> = virtio_queue::Reader<'a, BS<'a, AtomicBitmap>>;
/// Writes what the device returns to the guest.
pub(super) type Writer<'a> = virtio_queue::Writer<'a, BS<'a, AtomicBitmap>>;

/// A chain of the guest's buffers.
pub(super) type Chain<'a> = DescriptorChain<&'a GuestMemory>;

/// The error of a driver that has broken the rules: the device needs a reset.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Broken(pub(super) String);

impl From<virtio_queue::Error> for Broken {
    fn from(error: virtio_queue::Error) -> Self {
        Self(error.to_string())
    }
}

/// What happens to a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// It is returned, with so many bytes written.
    Done(u32),
    /// It stays in the queue until there is something to put into it.
    Wait,
}

/// What [`serve_chains`] has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// True if the driver wants an interrupt.
    pub(crate) interrupts: bool,
    /// True if there is more to do at once.
    pub(crate) has_more: bool,
}

/// Passes the available chains to `each`: at most as many as the queue has entries, so that a driver which never stops
/// adding chains cannot keep the device busy through a reset.
pub(super) fn serve_chains(
    queue: &mut Queue,
    memory: &GuestMemory,
    mut each: impl FnMut(Chain<'_>) -> Result<Step, Broken>,
) -> Result<Progress, Broken> {
    let mut budget = queue.size();
    let mut progress = Progress::default();
    let mut used_any = false;
    queue.disable_notification(memory)?;
    loop {
        let Some(chain) = queue.iter(memory)?.next() else {
            // The queue is empty, unless a chain came while notifications were still off.
            if !queue.enable_notification(memory)? {
                break;
            }
            if queue.iter(memory)?.next().is_none() {
                return Err(Broken("the available ring cannot be read".into()));
            }
            queue.go_to_previous_position();
            queue.disable_notification(memory)?;
            continue;
        };
        if budget == 0 {
            queue.go_to_previous_position();
            progress.has_more = true;
            break;
        }
        budget -= 1;
        let head = chain.head_index();
        match each(chain)? {
            Step::Done(len) => queue.add_used(memory, head, len)?,
            Step::Wait => {
                queue.go_to_previous_position();
                break;
            }
        }
        used_any = true;
    }
    progress.interrupts = used_any && queue.needs_notification(memory)?;
    Ok(progress)
}
