//! The prefix of the settings.

use core::ffi::CStr;

use pgrx::prelude::*;

/// Has the server refuse settings of this prefix that nobody defined, so that a typo does not go unnoticed.
pub fn reserve_settings(prefix: &'static CStr) {
    // SAFETY: the prefix lives as long as the process.
    unsafe {
        #[cfg(feature = "pg14")]
        pg_sys::EmitWarningsOnPlaceholders(prefix.as_ptr());
        #[cfg(not(feature = "pg14"))]
        pg_sys::MarkGUCPrefixReserved(prefix.as_ptr());
    }
}
