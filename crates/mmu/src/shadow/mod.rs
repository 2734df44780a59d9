//! Address spaces that survive a load of CR3.
//!
//! A load of CR3 that flushes obliges a processor to forget what it knows of an address space; what
//! it then finds in the tables is, mostly, what it knew. A context of a root that comes back is
//! kept here, and with it every entry of the guest's tables that its translations were derived from
//! ([`derived`]). In place of a flush the context *catches up*: the entries are compared with
//! memory, and what has changed is dropped. Afterwards it has no translation that a walk made now
//! would not find, which is all that a flush is for (SDM vol. 3, 4.10.4).
//!
//! Nothing else has to know of it: the tables may be written by other vCPUs, by the VMM or by
//! devices, and are not tracked. A context with more entries than are worth comparing is flushed.
//!
//! A tracked context belongs to a root and has the PCID that the root was last loaded with: whatever
//! was loaded with another PCID before is right for this one once it has caught up.
//!
//! A guest that says itself when a root's translations are to go spares the comparison:
//! [`promised`].
//!
//! Global translations survive a flushing load anyway and need no entries; pages that may be global
//! are dropped by INVLPG in all contexts ([`flushes`]).

pub(crate) mod derived;
pub(crate) mod flushes;
pub(crate) mod promised;
pub(crate) mod roots;
