//! The requests that an owner refuses while the disk with its metadata is full.
//!
//! A request that needs room is refused before it is executed, so that requests which free space can go on: the log
//! keeps a reserve for them. Reads always go on.

use wire::damage::DamageRequest;
use wire::meta::MetaRequest;
use wire::object::ObjectRequest;

/// The owner's shortage of room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pressure {
    /// No shortage.
    None,
    /// Only requests that free space may change anything.
    Reserve,
    /// No request may change anything.
    Exhausted,
}

impl Pressure {
    /// Whether a request has to be refused.
    pub(super) fn refuses(self, request: &MetaRequest) -> bool {
        match self {
            Pressure::None => false,
            Pressure::Reserve => needs_room(request),
            Pressure::Exhausted => !is_read(request),
        }
    }
}

fn needs_room(request: &MetaRequest) -> bool {
    use MetaRequest as R;
    match request {
        R::SetAttr { set, .. } => set.size.is_none(),
        R::Object(request) => {
            let makes_room = matches!(
                **request,
                ObjectRequest::Delete { .. }
                    | ObjectRequest::AbortUpload { .. }
                    | ObjectRequest::RemoveBucket { .. }
            );
            !makes_room && !is_object_read(request)
        }
        R::Make(_)
        | R::MakeUnnamed(_)
        | R::NoteRead { .. }
        | R::SetGuard { .. }
        | R::Rename { .. }
        | R::Link { .. }
        | R::SetXattr { .. }
        | R::Commit { .. }
        | R::CloneRange { .. }
        | R::AllocExtents => true,
        _ => false,
    }
}

fn is_object_read(request: &ObjectRequest) -> bool {
    use ObjectRequest as R;
    matches!(
        request,
        R::Get { .. }
            | R::Read { .. }
            | R::Head { .. }
            | R::List { .. }
            | R::ListParts { .. }
            | R::ListUploads { .. }
            | R::BucketSettings { .. }
    )
}

fn is_damage_read(request: &DamageRequest) -> bool {
    use DamageRequest as R;
    matches!(request, R::PieceAt { .. } | R::FilesOf { .. } | R::NameOf { .. } | R::List { .. })
}

fn is_read(request: &MetaRequest) -> bool {
    use MetaRequest as R;
    if let R::Object(request) = request {
        return is_object_read(request);
    }
    if let R::Damage(request) = request {
        return is_damage_read(request);
    }
    matches!(
        request,
        R::Heartbeat { .. }
            | R::Lookup { .. }
            | R::GetAttr { .. }
            | R::ReadDir { .. }
            | R::ReadLink { .. }
            | R::GetXattr { .. }
            | R::ListXattr { .. }
            | R::GetMap { .. }
            | R::StatFs
            | R::Acquire { .. }
            | R::Release { .. }
            | R::ReleaseAll { .. }
            | R::Forgot { .. }
            | R::NextFree { .. }
            | R::Owed { .. }
    )
}
