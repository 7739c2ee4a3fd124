//! Notes of unreadable pieces: each piece exists, and their number is right.

use std::ops::ControlFlow;

use wire::damage::DamageSums;

use super::{Check, FsckError};
use crate::keys::Keys;
use crate::values::{LostRecord, Piece};

const WRONG: &str = "status is wrong; report this";

impl Check<'_> {
    pub(super) fn lost(&mut self) -> Result<(), FsckError> {
        self.input.progress.begin("notes of damage");
        let said = self.get::<DamageSums>(&self.keys.value("damage"))?.unwrap_or_default().pieces;
        let (range, mut found) = (self.keys.all_lost(None), Vec::new());
        self.each::<LostRecord>(&range, 21..=21, |_, key, record| {
            found.push((Keys::piece_of_lost(key), record));
            ControlFlow::Continue(())
        })?;
        for ((map, off), record) in &found {
            let piece = self.get::<Piece>(&self.keys.piece(*map, *off))?.and_then(|piece| piece.at(*off));
            let extent = piece.and_then(|piece| piece.content.extent().map(|extent| extent.id));
            if extent != Some(record.extent) {
                let what = format!("map {map} is said to have lost extent {} at {off}", record.extent);
                self.find("lost_piece", what, WRONG);
            }
        }
        if said != found.len() as u64 {
            let what = format!("{said} pieces are said to be unreadable, and {} are noted", found.len());
            self.find("lost_sums", what, WRONG);
        }
        Ok(())
    }
}
