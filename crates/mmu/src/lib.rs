//! gva to gpa to hva: guest page walks, roots, permission views, software TLBs, write-protection.

#![forbid(unsafe_code)]
