//! Calls about nodes and tokens.

use hyper::Method;
use wire::cluster::CheckParts;

use super::{AdminClient, CallError};
use crate::nodes::{
    ClientInfo, CreateToken, DrainNode, NewToken, NodeCheck, NodeDrain, NodeInfo, SetMaintenance, StopCheck,
    TokenInfo, UpgradeInfo,
};

impl AdminClient {
    /// All nodes by number.
    pub async fn nodes(&self) -> Result<Vec<NodeInfo>, CallError> {
        self.call(Method::GET, "/v1/nodes", None::<&()>).await
    }

    /// What would stop if a node were stopped now.
    pub async fn stop_check(&self, id: u32) -> Result<StopCheck, CallError> {
        self.call(Method::GET, &format!("/v1/nodes/{id}/stop-check"), None::<&()>).await
    }

    /// Lets a node look at its machine.
    pub async fn check(&self, id: u32, what: CheckParts) -> Result<NodeCheck, CallError> {
        self.call(Method::POST, &format!("/v1/nodes/{id}/check"), Some(&what)).await
    }

    /// Moves everything off the drives of a node.
    pub async fn drain_node(&self, id: u32, request: DrainNode) -> Result<NodeDrain, CallError> {
        self.call(Method::POST, &format!("/v1/nodes/{id}/drain"), Some(&request)).await
    }

    /// Begins or ends the maintenance of a node.
    pub async fn set_maintenance(&self, id: u32, request: &SetMaintenance) -> Result<NodeInfo, CallError> {
        self.call(Method::POST, &format!("/v1/nodes/{id}/maintenance"), Some(request)).await
    }

    /// Takes a node without drives out of the cluster.
    pub async fn remove_node(&self, id: u32) -> Result<NodeInfo, CallError> {
        self.call(Method::DELETE, &format!("/v1/nodes/{id}"), None::<&()>).await
    }

    /// How far an upgrade of the nodes has come.
    pub async fn upgrade(&self) -> Result<UpgradeInfo, CallError> {
        self.call(Method::GET, "/v1/upgrade", None::<&()>).await
    }

    /// Lets all nodes write the newest formats that they know.
    pub async fn finalize_upgrade(&self) -> Result<UpgradeInfo, CallError> {
        self.call(Method::POST, "/v1/upgrade/finalize", None::<&()>).await
    }

    /// Makes a token with which nodes join.
    pub async fn create_token(&self, request: &CreateToken) -> Result<NewToken, CallError> {
        self.call(Method::POST, "/v1/tokens", Some(request)).await
    }

    /// All tokens by number.
    pub async fn tokens(&self) -> Result<Vec<TokenInfo>, CallError> {
        self.call(Method::GET, "/v1/tokens", None::<&()>).await
    }

    /// Removes a token.
    pub async fn remove_token(&self, id: u32) -> Result<TokenInfo, CallError> {
        self.call(Method::DELETE, &format!("/v1/tokens/{id}"), None::<&()>).await
    }

    /// All clients that are no nodes, by number.
    pub async fn clients(&self) -> Result<Vec<ClientInfo>, CallError> {
        self.call(Method::GET, "/v1/clients", None::<&()>).await
    }

    /// Removes a client.
    pub async fn remove_client(&self, id: u32) -> Result<ClientInfo, CallError> {
        self.call(Method::DELETE, &format!("/v1/clients/{id}"), None::<&()>).await
    }
}
