//! Taking descriptor chains from a queue, one after the other, within limits.

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::bitmap::{AtomicBitmap, BS};

use crate::memory::GuestMemory;

/// What the guest has written for us.
pub(super) type Reader<'a> = virtio_queue::Reader<'a, BS<'a, AtomicBitmap>>;
/// Where we write.
pub(super) type Writer<'a> = virtio_queue::Writer<'a, BS<'a, AtomicBitmap>>;

/// A chain of the guest's buffers.
pub(super) type Chain<'a> = DescriptorChain<&'a GuestMemory>;

/// The driver broke the rules; the device needs a reset.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Broken(pub(super) String);

impl From<virtio_queue::Error> for Broken {
    fn from(error: virtio_queue::Error) -> Self {
        Self(error.to_string())
    }
}

/// What to do with a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Give it back, with so many bytes written.
    Done(u32),
    /// Leave it in the queue until there is something to put into it.
    Wait,
}

/// What [`serve_chains`] achieved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The driver wants an interrupt.
    pub(crate) interrupts: bool,
    /// There is more to do at once.
    pub(crate) has_more: bool,
}

/// Hands the available chains to `each`, at most one queue's worth of them, so that a driver which
/// never stops adding cannot keep the device busy through a reset.
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
            // Nothing more, unless something came while notifications were still off.
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
