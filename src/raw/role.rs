//! Running a statement of ours with the rights of another role.

use pgrx::prelude::*;

/// While it lives, permissions are checked for another role, and neither SET ROLE nor SET SESSION AUTHORIZATION is possible.
pub struct AsRole {
    role: pg_sys::Oid,
    context: core::ffi::c_int,
}

impl AsRole {
    /// Begins to act as the role.
    pub fn begin(role: pg_sys::Oid) -> Self {
        let mut before = Self { role: pg_sys::InvalidOid, context: 0 };
        // SAFETY: both functions read and write two variables of this process.
        unsafe {
            pg_sys::GetUserIdAndSecContext(&mut before.role, &mut before.context);
            pg_sys::SetUserIdAndSecContext(
                role,
                before.context | pg_sys::SECURITY_LOCAL_USERID_CHANGE as core::ffi::c_int,
            );
        }
        before
    }
}

impl Drop for AsRole {
    fn drop(&mut self) {
        // SAFETY: as in `begin`. Runs on errors too, which pgrx turns into unwinding; the server's own clean-up of a
        // failed transaction restores the role once more.
        unsafe { pg_sys::SetUserIdAndSecContext(self.role, self.context) };
    }
}
