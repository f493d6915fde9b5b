//! What only the server knows: when its catalogues change, and which transactions are our own.

use std::cell::Cell;

use pgrx::prelude::*;

thread_local! {
    static CATALOG_GENERATION: Cell<u64> = const { Cell::new(0) };
}

/// A number that differs from an earlier one if a function or a schema of this database may have changed in between,
/// which is the case whenever this extension was dropped, created or found itself in a renamed schema.
pub fn catalog_generation() -> u64 {
    let generation = CATALOG_GENERATION.get();
    if generation > 0 {
        return generation;
    }
    CATALOG_GENERATION.set(1);
    for cache in [pg_sys::SysCacheIdentifier::PROCOID, pg_sys::SysCacheIdentifier::NAMESPACEOID] {
        // SAFETY: the callback has the signature that the server wants, does nothing that can fail, and stays
        // registered for the life of the process, as this library stays loaded.
        unsafe {
            pg_sys::CacheRegisterSyscacheCallback(cache as _, Some(catalog_changed), pg_sys::Datum::null());
        }
    }
    1
}

/// Learns now of what other sessions changed in the catalogues, which the server else does when it locks a relation: after
/// it has looked for the relation under a name that may be another's by now.
pub fn accept_invalidations() {
    // SAFETY: the server calls it itself wherever it locks a relation.
    unsafe { pg_sys::AcceptInvalidationMessages() };
}

/// No `pg_guard`: nothing in it can raise an error or panic, and the server may call it within a critical section.
unsafe extern "C-unwind" fn catalog_changed(_argument: pg_sys::Datum, _cache: core::ffi::c_int, _hash: u32) {
    CATALOG_GENERATION.set(CATALOG_GENERATION.get().wrapping_add(1).max(1));
}

/// Whether a row was written by the present transaction, or a part of it that was not rolled back.
pub fn is_current_transaction(writer: pg_sys::TransactionId) -> bool {
    // SAFETY: a look at the state of the present transaction.
    unsafe { pg_sys::TransactionIdIsCurrentTransactionId(writer) }
}
