//! The members of a cluster of etcd, for the operator of that cluster: which there are, and changes of them, one at a time.

use super::client::CallError;
use super::proto::{
    Call, MemberAddRequest, MemberListRequest, MemberOfCluster, MemberPromoteRequest, MemberRemoveRequest,
};
use super::{Etcd, EtcdOptions};
use crate::log::LogError;
use crate::log::remote::{Patience, SHORT};

/// A member of a cluster of etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdMember {
    /// Its number, which no other ever had.
    pub id: u64,
    /// Its name; empty until it has begun.
    pub name: String,
    /// Where the others reach it: `https://host:port`.
    pub peer_url: String,
    /// It copies what the others have, and has no vote.
    pub is_learner: bool,
}

impl From<MemberOfCluster> for EtcdMember {
    fn from(member: MemberOfCluster) -> Self {
        let MemberOfCluster { id, name, peer_urls, is_learner } = member;
        Self { id, name, peer_url: peer_urls.into_iter().next().unwrap_or_default(), is_learner }
    }
}

impl Etcd {
    /// Goes to other members from now on, of the same cluster and under the same prefix.
    ///
    /// # Errors
    /// `Io` if a setting is wrong.
    pub fn set_members(&self, options: &EtcdOptions) -> Result<(), LogError> {
        Ok(self.client.set_members(options)?)
    }

    /// The members, as far as the one that answers knows.
    ///
    /// # Errors
    /// If none answers.
    pub async fn list_members(&self) -> Result<Vec<EtcdMember>, LogError> {
        let client = self.client.clone();
        let answer =
            self.client.run(async move { client.repeat(MemberListRequest {}, SHORT).await }).await??;
        Ok(answer.members.into_iter().map(EtcdMember::from).collect())
    }

    /// Takes a member in that has no vote yet. Returns its number.
    ///
    /// # Errors
    /// If etcd refuses that, or it is not known whether it was done: the list says so.
    pub async fn add_learner(&self, peer_url: &str) -> Result<u64, LogError> {
        let request = MemberAddRequest { peer_urls: vec![peer_url.to_owned()], is_learner: true };
        let member = self.once(request).await?.member;
        member.map(|member| member.id).ok_or_else(|| LogError::Damaged("etcd added no member".to_owned()))
    }

    /// Gives a member a vote.
    ///
    /// # Errors
    /// If it does not have yet what the others have; and as [`Etcd::add_learner`].
    pub async fn promote(&self, id: u64) -> Result<(), LogError> {
        self.once(MemberPromoteRequest { id }).await.map(drop)
    }

    /// Takes a member out. etcd refuses that if the others that run are too few.
    ///
    /// # Errors
    /// As [`Etcd::add_learner`].
    pub async fn remove_member(&self, id: u64) -> Result<(), LogError> {
        self.once(MemberRemoveRequest { id }).await.map(drop)
    }

    async fn once<R: Call>(&self, request: R) -> Result<R::Answer, LogError> {
        let (client, Patience { total, .. }) = (self.client.clone(), SHORT);
        let answer: Result<R::Answer, CallError> =
            self.client.run(async move { client.once(request, total).await }).await?;
        Ok(answer?)
    }
}
