//! Address spaces that survive a load of CR3.
//!
//! A load of CR3 that flushes obliges a processor to forget the translations of an address space; what it then finds in
//! the tables is mostly what it forgot. Here the context of a root that comes back is kept, and with it every entry of
//! the guest's tables that its translations were derived from ([`derived`]). In place of a flush the context *catches
//! up*: the entries are compared with memory, and translations from changed entries are dropped. Afterwards the context
//! has no translation that a page walk made now would not find, which is all that a flush must achieve (SDM vol. 3,
//! 4.10.4).
//!
//! The guest's tables are not tracked: other vCPUs, the VMM and devices may write them without telling. A context with
//! more entries than are worth comparing is flushed.
//!
//! A tracked context belongs to a root and has the PCID that the root was last loaded with. Translations made under
//! another PCID are right for this one once the context has caught up. Which root a PCID was last loaded with is noted
//! ([`crate::SwitchEpochs`]): that root's context has missed no flush of the PCID.
//!
//! If the guest itself says when a root's translations must go, no comparison is needed: [`promised`].
//!
//! Global translations survive a flushing load anyway and need no entries; INVLPG drops a page that may be global in
//! all contexts ([`flushes`]). Where they are flushed as often as CR3 is loaded, there are none ([`crate::globals`]).

pub(crate) mod derived;
pub(crate) mod flushes;
pub(crate) mod promised;
pub(crate) mod roots;
pub mod words;
